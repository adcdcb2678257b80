from dataclasses import replace

import pytest
from hypothesis import given
from random_graphs import graphs

from lightning_remat import Graph, Node


@pytest.mark.slow
@given(graphs())
def test_json_round_trip(graph: Graph) -> None:
    assert Graph.from_json(graph.to_json()) == graph


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((Node("a", inputs=(0,)),), "inputs names node 0"),
        ((Node("a"), Node("b", saved=(2,))), "saved names node 2"),
        ((Node("a", output_bytes=-1),), "output_bytes is -1"),
        ((Node("a", forward_seconds=float("nan")),), "forward_seconds is nan"),
        ((Node("a", output_bytes=4), Node("v", inputs=(0,), storage_of=0, output_bytes=4)), "views node 0"),
        ((Node("v", storage_of=0),), "storage_of names node 0"),
        ((Node("a", gradient_bytes=-2),), "gradient_bytes is -2"),
    ],
)
def test_contradictions_are_refused(nodes: tuple[Node, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Graph(nodes)


def test_outputs_must_exist() -> None:
    with pytest.raises(ValueError, match="outputs holds node 1"):
        Graph((Node("a"),), outputs=(1,))


def test_unknown_json_field_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown fields"):
        Graph.from_json('{"input_bytes": 0, "static_bytes": 0, "nodes": [{"name": "a", "bytes": 3}]}')


def test_derived_structure() -> None:
    base, view = Node("a", output_bytes=8), Node("v", inputs=(0,), storage_of=0)
    second = Node("w", inputs=(1,), storage_of=1)
    graph = Graph((base, view, second, Node("b", inputs=(0, 2, 2), output_bytes=4)))
    assert graph.users == ((1, 3), (2,), (3,), ())
    assert graph.roots == (0, 0, 0, 3)
    assert graph.gradient_bytes(2) == 8
    assert graph.shares_gradient(2) == (1,)
    assert graph.shares_gradient(3) == ()


def test_a_run_again_is_not_recorded_and_has_a_price() -> None:
    node = Node("a", forward_seconds=4.0, recording_seconds=1.0, rerun_price=0.5)
    assert node.rerun_seconds == 3.5
    priced = Graph((node,)).with_reruns_priced().nodes[0]
    assert priced == Node("a", forward_seconds=3.5)
    assert priced.rerun_seconds == 3.5
    extrapolated = replace(node, recording_seconds=5.0)
    assert extrapolated.rerun_seconds == 0.5


def test_seconds_of_another_profile() -> None:
    here = Graph((Node("a", output_bytes=8, forward_seconds=1.0, backward_seconds=2.0),))
    there = Graph((Node("a", forward_seconds=0.5, backward_seconds=0.25, recording_seconds=0.125),))
    scaled = here.with_seconds_of(there, 4.0).nodes[0]
    assert (scaled.output_bytes, scaled.forward_seconds, scaled.backward_seconds) == (8, 2.0, 1.0)
    assert scaled.recording_seconds == 0.5
    with pytest.raises(ValueError, match="do not describe one module"):
        here.with_seconds_of(Graph((Node("b"),)))
