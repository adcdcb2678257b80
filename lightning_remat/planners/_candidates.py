"""Picks from a family of schedules by the simulator's word: the last step of most planners."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..budget import format_bytes
from ..errors import InfeasibleBudgetError
from ..schedules.compiled_simulator import Judge
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ..schedules.simulator import simulate


class Candidate(NamedTuple):
    """A schedule of a family with its simulated peak and seconds."""

    peak_bytes: int
    seconds: float
    schedule: Schedule


def trade_off(graph: Graph, schedules: Iterable[Schedule]) -> tuple[Candidate, ...]:
    """The schedules that no other one beats in both peak and seconds, by rising peak and falling seconds.

    A family that does not depend on the budget is judged once, and then looked up for every budget.

    Args:
        graph: The operations.
        schedules: The family, at least one.
    """
    judge = Judge(graph)
    judged = [Candidate(*judge.cost(schedule), schedule) for schedule in schedules]
    judged.sort(key=lambda candidate: candidate[:2])
    front: list[Candidate] = []
    for candidate in judged:
        if not front or candidate.seconds < front[-1].seconds:
            front.append(candidate)
    return tuple(front)


def fastest_that_fits(graph: Graph, budget_bytes: int, family: Sequence[Candidate], *, planner: str) -> Schedule:
    """The fastest schedule of the family whose simulated peak is within the budget.

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.
        family: What `trade_off` returned.
        planner: The family's name, for the error.

    Returns:
        One of the family.

    Raises:
        InfeasibleBudgetError: None fits; carries the lowest peak of the family and the node that sets it.
    """
    fitting = bisect_right(family, budget_bytes, key=lambda candidate: candidate.peak_bytes)
    if fitting:
        return family[fitting - 1].schedule
    raise infeasible(graph, budget_bytes, family[0].schedule, planner=planner)


def infeasible(graph: Graph, budget_bytes: int, schedule: Schedule, *, planner: str) -> InfeasibleBudgetError:
    """The error of a planner whose lowest peak is that of `schedule`."""
    simulation = simulate(graph, schedule)
    setter, name = "inputs and parameters, for there are no operations", None
    if schedule.actions:
        kind, n = schedule.actions[simulation.peak_position]
        name = graph.nodes[n].name
        setter = f"the {'backward' if kind == 'B' else 'forward'} of {name!r}"
    return InfeasibleBudgetError(
        f"{planner} cannot go below {simulation.peak_bytes} bytes ({format_bytes(simulation.peak_bytes)}), set by "
        f"{setter}, and the budget is {budget_bytes} bytes ({format_bytes(budget_bytes)}): raise memory_budget, lower "
        "the batch size or choose another planner",
        minimum_bytes=simulation.peak_bytes,
        budget_bytes=budget_bytes,
        node=name,
    )
