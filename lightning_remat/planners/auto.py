"""The default planner: the whole trade-off of the graph by local search at the true peak, then a look-up."""

from __future__ import annotations

from ..lowering import keep_everything
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ._auto.front_search import front_of
from ._auto.pricing import finished, is_priced
from ._candidates import fastest_that_fits, infeasible, trade_off


def plan_auto(graph: Graph, budget_bytes: int, *, effort: float = 1.0, like: Graph | None = None) -> Schedule:
    """The fastest schedule known for the graph whose true peak is within the budget.

    The first call for a graph builds its front: all schedules found between plain autograd and the lowest peak that
    no other one beats in both peak and seconds. Every answer is looked up in it, so more budget is never slower,
    whatever order budgets are asked in; the front depends neither on the budget nor on what was planned before, and
    its search is deterministic. No optimum is proven; `explanation.explain` reports the gap to a lower bound.

    The answers of the quick planners (`portfolio.RIVALS`) are in the front, so that none of those is faster at any
    budget or reaches a lower peak. The others are beaten by search alone.

    A schedule is described by *absence windows* (see `window_simulator`): any value may be dropped between any two of
    its uses, forward or backward, once or repeatedly. The search goes down from plain autograd drop by drop, each
    the one that frees the most bytes above the limit for a second; starts also from what a linear program keeps, and
    from a dynamic program over positions in the node order, which sees what single drops do not; holds again what
    fits; and perturbs and repairs the best at every level, the lowest most, until its effort is spent.

    Where stretches of recomputations, tapes or hooks have prices, the front tells what states cost with tapes kept and
    stretches joined within the peak that it tells (see `pricing`), and so they are answered.

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.
        effort: Multiple of the usual search (some seconds for a few hundred nodes).
        like: The same operations at another batch size, from whose front the search starts and is shorter for it.

    Returns:
        A schedule whose simulated peak is within the budget.

    Raises:
        InfeasibleBudgetError: No schedule that was found fits; at exactly its `minimum_bytes` this succeeds.

    Reference: the dynamic program extends Beaumont et al. 2024, Theorem 4.8 (Rotor).
    """
    if not graph.nodes:
        return fastest_that_fits(graph, budget_bytes, trade_off(graph, [keep_everything(graph)]), planner="auto")
    front = front_of(graph, effort, like)
    found = front.within(budget_bytes)
    schedule = front.schedule(found or 0)
    if found is None:
        raise infeasible(graph, budget_bytes, schedule, planner="auto")
    return finished(graph, schedule, front.peaks[found]) if is_priced(graph) else schedule
