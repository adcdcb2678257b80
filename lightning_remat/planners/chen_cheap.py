"""Drop the results of cheap operations, keep those of costly ones."""

from __future__ import annotations

from functools import lru_cache

from ..lowering import lower_kept
from ..schedules.graph import Graph
from ..schedules.kinds import CHEAP, consists_of
from ..schedules.schedule import Schedule
from ._candidates import Candidate, fastest_that_fits, trade_off


def plan_chen_cheap(graph: Graph, budget_bytes: int, *, cheap_kinds: frozenset[str] = CHEAP) -> Schedule:
    """The fastest schedule that drops some cheap results and fits the budget.

    Cheap results are dropped in the order of the bytes they free for a second of recomputation, as many as the
    budget asks for; the family ends with dropping all of them. The cost is one simulation for each of at most 64
    prefixes of that order.

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.
        cheap_kinds: The kinds that may be dropped; a fused node is cheap if all its parts are.

    Returns:
        A schedule whose simulated peak is within the budget.

    Raises:
        InfeasibleBudgetError: Even dropping all cheap results is not enough.

    Reference: Chen et al. 2016, section 4.2 (drop the results of low-cost operations).
    """
    return fastest_that_fits(graph, budget_bytes, _family(graph, cheap_kinds), planner="chen_cheap")


@lru_cache(maxsize=8)
def _family(graph: Graph, cheap_kinds: frozenset[str]) -> tuple[Candidate, ...]:
    everything = set(range(len(graph.nodes)))
    cheap = [n for n, node in enumerate(graph.nodes) if not node.is_view and consists_of(node, cheap_kinds)]
    freed = {n: graph.nodes[n].output_bytes + graph.nodes[n].tape_bytes for n in cheap}
    cheap.sort(key=lambda n: -freed[n] / max(graph.nodes[n].forward_seconds, 1e-12))  # bytes for a second
    step = max(1, -(-len(cheap) // 64))
    counts = [*range(0, len(cheap), step), len(cheap)]
    return trade_off(graph, (lower_kept(graph, everything - set(cheap[:k])) for k in counts))
