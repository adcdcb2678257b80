"""Tapes that the default planner keeps where runs have a price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_remat import Graph, Node, simulate
from lightning_remat.planners._auto.residents import costs_of
from lightning_remat.planners._auto.tapes import tapes_kept
from lightning_remat.planners.auto import plan_auto
from lightning_remat.schedules.arrays import decode, encode
from lightning_remat.schedules.schedule import Action, Schedule


def _norms(tapes: tuple[int, ...]) -> Graph:
    """A chain of operations with tapes of these bytes."""
    return Graph(
        tuple(
            Node(
                f"norm{n}",
                kind="layer_norm",
                inputs=(n - 1,) if n else (),
                saved=(n - 1,) if n else (),
                output_bytes=100,
                tape_bytes=tape,
                forward_seconds=1.0,
                backward_seconds=2.0,
            )
            for n, tape in enumerate(tapes)
        )
    )


def with_tapes_kept(graph: Graph, schedule: Schedule, budget_bytes: int) -> Schedule:
    kept = tapes_kept(costs_of(graph), encode(graph, schedule), budget_bytes)
    return decode(graph, kept) if len(kept) else schedule


def _discarded_early(schedule: Schedule) -> set[int]:
    """The operations whose tape goes before their backward."""
    first = list(schedule).index
    return {n for kind, n in schedule if kind == "T" and first(Action("T", n)) < first(Action("B", n))}


@pytest.mark.slow
def test_small_tapes_stay_and_large_ones_go() -> None:
    graph = _norms((1, 80, 1, 80, 1, 80, 1, 1))
    plain = plan_auto(graph, 10**6)
    budget = simulate(graph, plain).peak_bytes * 3 // 4
    lowest = plan_auto(graph, budget)
    assert _discarded_early(lowest), "a tape that a run brings anyway goes"
    kept = with_tapes_kept(graph, lowest, budget)
    before, after = simulate(graph, lowest), simulate(graph, kept)  # it breaks no rule
    assert after.peak_bytes <= budget
    assert after.seconds == before.seconds
    assert [a for a in kept if a.kind in "FB"] == [a for a in lowest if a.kind in "FB"]
    assert {graph.nodes[n].tape_bytes for n in _discarded_early(kept)} == {80}
    priced = replace(graph, nodes=tuple(replace(node, stretch_price=0.5) for node in graph.nodes))
    chosen = plan_auto(priced, budget)
    assert {graph.nodes[n].tape_bytes for n in _discarded_early(chosen)} == {80}


def test_a_budget_without_room_leaves_a_schedule() -> None:
    graph = _norms((10, 10, 10, 10, 10, 10))
    lowest = plan_auto(graph, simulate(graph, plan_auto(graph, 10**6)).peak_bytes * 3 // 4)
    assert simulate(graph, with_tapes_kept(graph, lowest, 0)).peak_bytes == simulate(graph, lowest).peak_bytes
