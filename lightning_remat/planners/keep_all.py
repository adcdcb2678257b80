"""Plain autograd: every value that a backward needs is kept, nothing is recomputed."""

from __future__ import annotations

from ..lowering import lower_kept
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ._candidates import fastest_that_fits, trade_off


def plan_keep_all(graph: Graph, budget_bytes: int) -> Schedule:
    """The schedule of a step without recomputation, the baseline of every comparison.

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.

    Returns:
        A schedule whose simulated peak is within the budget.

    Raises:
        InfeasibleBudgetError: The plain step needs more than the budget.
    """
    return fastest_that_fits(
        graph, budget_bytes, trade_off(graph, [lower_kept(graph, range(len(graph.nodes)))]), planner="keep_all"
    )
