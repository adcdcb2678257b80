"""Stored texts are read back, or refused with one error; files are written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_remat import Graph, Node, Plan, plan
from lightning_remat.plans.plan import StepPlan
from lightning_remat.plans.step_memory import Surroundings
from lightning_remat.plans.step_planner import plan_step
from lightning_remat.schedules import stored
from lightning_remat.schedules.graph import TensorKind
from lightning_remat.schedules.stored import write_whole

COST: dict[str, Any] = {"output_bytes": 100, "forward_seconds": 1.0, "backward_seconds": 2.0}
GRAPH = Graph(
    tuple(Node(f"relu{i}", inputs=(i - 1,) if i else (), saved=(i,), **COST) for i in range(9)),
    profiled_on=(TensorKind("float32", (8, 3)), TensorKind("int64", ())),
)


def texts() -> list[Any]:
    step = plan_step(["a"], {"a": GRAPH}, 800, "periodic", Surroundings(0, 0))
    return [
        pytest.param(Graph, GRAPH.to_json(), id="graph"),
        pytest.param(Plan, plan(GRAPH, 800, "periodic").to_json(), id="plan"),
        pytest.param(StepPlan, step.to_json(), id="step"),
    ]


@pytest.mark.parametrize(("kind", "text"), texts())
def test_whatever_is_cut_off_is_refused(kind: Any, text: str) -> None:
    assert kind.from_json(text).to_json() == text
    for length in (0, 1, len(text) // 3, len(text) - 1):
        with pytest.raises(ValueError, match=r"the text is no stored (graph|plan).*(is empty|breaks off)"):
            kind.from_json(text[:length])


@pytest.mark.parametrize(("kind", "text"), texts())
def test_whatever_lacks_a_part_is_refused(kind: Any, text: str) -> None:
    optional = {"profiled_on", "outputs", "rung", "reasons", "plain", "correction_bytes", "plain_correction_bytes"}
    optional |= {"plain_graphs", "beside_seconds", "let_go"}
    for name in json.loads(text).keys() - optional:
        fewer = {k: v for k, v in json.loads(text).items() if k != name}
        with pytest.raises(ValueError, match=rf"no stored .* has no '({name}|schedule)'"):
            kind.from_json(json.dumps(fewer))


@pytest.mark.parametrize("kind", [Graph, Plan, StepPlan])
@pytest.mark.parametrize("foreign", ["[]", "7", '"plan"', "null", '{"a": 1}', "# a note", '{"nodes": 3}'])
def test_whatever_another_program_wrote_is_refused(kind: Any, foreign: str) -> None:
    with pytest.raises(ValueError, match="the text is no stored"):
        kind.from_json(foreign)


def test_what_a_graph_was_profiled_on_is_kept_and_makes_no_other_graph_of_it() -> None:
    assert Graph.from_json(GRAPH.to_json()).profiled_on == GRAPH.profiled_on
    assert Graph(GRAPH.nodes) == GRAPH
    assert hash(Graph(GRAPH.nodes)) == hash(GRAPH)


def test_a_file_that_could_not_be_written_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_whole(path, "first")
    path.chmod(0o640)

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stored.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "second")
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["plan.json"]
    monkeypatch.undo()
    write_whole(path, "second")
    assert path.read_text() == "second"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_link_is_written_through(tmp_path: Path) -> None:
    path, link = tmp_path / "plan.json", tmp_path / "link.json"
    path.write_text("first")
    link.symlink_to(path)
    write_whole(link, "second")
    assert link.is_symlink()
    assert path.read_text() == "second"
