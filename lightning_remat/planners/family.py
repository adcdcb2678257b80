"""Picks from a family of schedules by the simulator's word: the last step of most planners."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import InfeasibleBudgetError
from ..graph import Graph
from ..schedule import Schedule
from ..simulator import Simulation, simulate


def fastest_that_fits(graph: Graph, budget_bytes: int, candidates: Iterable[Schedule], *, planner: str) -> Schedule:
    """The fastest candidate whose simulated peak is within the budget (ties: the lower peak).

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.
        candidates: The schedules of the family, at least one.
        planner: The family's name, for the error.

    Returns:
        One of the candidates.

    Raises:
        InfeasibleBudgetError: None fits; carries the lowest peak of the family and the node that sets it.
    """
    best: tuple[tuple[float, int], Schedule] | None = None
    lowest: tuple[Simulation, Schedule] | None = None
    for schedule in candidates:
        simulation = simulate(graph, schedule)
        if simulation.peak_bytes <= budget_bytes:
            key = (simulation.seconds, simulation.peak_bytes)
            if best is None or key < best[0]:
                best = (key, schedule)
        elif lowest is None or simulation.peak_bytes < lowest[0].peak_bytes:
            lowest = (simulation, schedule)
    if best is not None:
        return best[1]
    assert lowest is not None, "a family has at least one schedule"
    raise infeasible(graph, budget_bytes, lowest[1], lowest[0], planner=planner)


def infeasible(
    graph: Graph, budget_bytes: int, schedule: Schedule, simulation: Simulation, *, planner: str
) -> InfeasibleBudgetError:
    """The error of a planner whose lowest peak is that of `schedule`."""
    setter, name = "inputs and parameters, for there are no operations", None
    if schedule.actions:
        kind, n = schedule.actions[simulation.peak_position]
        name = graph.nodes[n].name
        setter = f"the {'backward' if kind == 'B' else 'forward'} of {name!r}"
    return InfeasibleBudgetError(
        f"{planner} cannot go below {simulation.peak_bytes} bytes, set by {setter}, and the budget is {budget_bytes} "
        "bytes: raise memory_budget, lower the batch size or choose another planner",
        minimum_bytes=simulation.peak_bytes,
        budget_bytes=budget_bytes,
        node=name,
    )
