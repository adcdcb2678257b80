"""The picture of a schedule counts what the schedule says."""

import json

import numpy as np
from PIL import Image

from lightning_remat import Graph, Node, Plan
from schedule_picture import _bytes_by_runs, _residency, blocks, plot_schedule

NODES = tuple(
    Node(
        f"layer{i // 2}.{i % 2}.relu",
        kind="relu",
        inputs=(i - 1,) if i else (),
        saved=(i,),
        output_bytes=2**20,
        forward_seconds=1.0,
        backward_seconds=2.0,
    )
    for i in range(4)
)
TEXT = "F0 F1 D0 F2 D1 F3 B3 D3 B2 D2 F0 F1 B1 D1 B0 D0"


def planned() -> Plan:
    graph = Graph(NODES)
    text = {"planner": "periodic", "budget_bytes": 2**30, "planning_seconds": 0.0, "schedule": TEXT}
    return Plan.from_json(json.dumps({**text, "graph": json.loads(graph.to_json())}))


def test_blocks_go_as_deep_as_they_may():
    names = [node.name for node in NODES]
    assert blocks(names, most=2) == (["layer0", "layer1"], [0, 0, 1, 1])
    assert blocks(names, most=4) == (["layer0.0", "layer0.1", "layer1.0", "layer1.1"], [0, 1, 2, 3])


def test_bytes_are_counted_by_how_often_they_are_made():
    made = _bytes_by_runs(planned(), [0, 0, 1, 1], 2) / 2**20
    assert made.tolist() == [[0, 2, 0, 0], [2, 0, 0, 0]]


def test_residency_follows_the_schedule():
    ends, shares, again = _residency(planned(), [0, 0, 1, 1], 2)
    assert ends.tolist() == [1, 2, 3, 4, 6, 8, 9, 10, 12, 14]
    np.testing.assert_allclose(shares[0], [0.5, 1, 0.5, 0, 0, 0, 0.5, 1, 1, 0.5])
    np.testing.assert_allclose(shares[1], [0, 0, 0.5, 1, 1, 0.5, 0, 0, 0, 0])
    assert again == [(0, 8, 9), (0, 9, 10)]


def test_the_picture_is_drawn(tmp_path):
    plot_schedule(planned(), tmp_path / "schedule.png", "four layers")
    with Image.open(tmp_path / "schedule.png") as picture:
        assert picture.width > 1000
