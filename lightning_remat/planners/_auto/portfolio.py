"""The schedules of the quick planners: starts of the search of `auto`, which so never loses to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...budget import ALL_BYTES
from ...errors import InfeasibleBudgetError
from ...schedules.compiled_simulator import Judge
from ...schedules.graph import Graph
from ...schedules.schedule import Schedule
from .._candidates import Candidate
from .._chain.stages import cut_stages
from ..checkmate import plan_checkmate
from ..chen import plan_chen
from ..chen_cheap import plan_chen_cheap
from ..chen_recursive import plan_chen_recursive
from ..dtr import plan_dtr
from ..feng import plan_feng
from ..griewank import plan_revolve
from ..kusumoto import plan_kusumoto_approx, plan_kusumoto_exact
from ..periodic import plan_periodic
from ..rotor import plan_rotor, plan_rotor_floating, rotor_candidates

RIVALS: dict[Callable[[Graph, int], Schedule], int] = {
    plan_chen_cheap: 5000,
    plan_periodic: 5000,
    plan_kusumoto_approx: 700,
    plan_chen: 700,
    plan_dtr: 700,
    plan_chen_recursive: 700,
    plan_rotor: 24,
    plan_rotor_floating: 24,
    plan_feng: 120,
    plan_kusumoto_exact: 40,
    plan_revolve: 24,
    plan_checkmate: 12,
}
"""Planner → the most nodes of a graph that it answers quickly, for what its answers are worth."""

MOST_STAGES = 350
"""Of a chain that rotor solves in some seconds; its time grows with the cube."""


def rival_candidates(graph: Graph) -> Iterator[Candidate]:
    """What the quick planners answer to every budget, each from ample memory down to its lowest peak."""
    judge = Judge(graph)
    for planner, most_nodes in RIVALS.items():
        if len(graph.nodes) <= most_nodes:
            yield from _answers(judge, planner)


def deep_candidates(graph: Graph) -> Iterator[Candidate]:
    """What the planners for long chains answer to every budget: `rotor` where its tables are not too large."""
    if len(cut_stages(graph)) <= MOST_STAGES:
        yield from rotor_candidates(graph)
    else:
        yield from _answers(Judge(graph), plan_chen_recursive)


def _answers(judge: Judge, planner: Callable[[Graph, int], Schedule]) -> Iterator[Candidate]:
    budget_bytes = ALL_BYTES
    while True:
        try:
            schedule = planner(judge.graph, budget_bytes)
        except InfeasibleBudgetError:
            return
        peak_bytes, seconds = judge.cost(schedule)
        yield Candidate(peak_bytes, seconds, schedule)
        budget_bytes = peak_bytes - 1
