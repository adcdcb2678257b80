"""Greedy eviction by cost, size and staleness, as an eager framework would do it online, replayed offline."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..lowering import keep_everything, with_liveness
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ..schedules.simulator import simulate
from ._candidates import Candidate, fastest_that_fits, trade_off
from ._eviction import evict, pack_step

_NUM_LIMITS = 96
_MOST_RUNS = 20  # of a node on average, before an attempt counts as thrashing


def plan_dtr(graph: Graph, budget_bytes: int) -> Schedule:
    """The fastest schedule that fits, of those that online eviction makes under 96 memory limits.

    Eviction knows the past alone: it drops, when memory runs out, the value of least recomputation cost per byte and
    second of staleness. Replayed offline, what it makes is known to its end, so that every discard moves up to the
    last use before it; the peak then lies below the limit, and limits above the budget are tried too. The schedules
    do not depend on the budget and are remembered for the last few graphs.

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.

    Returns:
        A schedule whose simulated peak is within the budget.

    Raises:
        InfeasibleBudgetError: No limit gives a schedule that fits.

    Reference: Kirisame et al. 2021 (Dynamic Tensor Rematerialization), section 2; Beaumont et al. 2024, section 2.3.
    """
    return fastest_that_fits(graph, budget_bytes, _family(graph), planner="dtr")


@lru_cache(maxsize=8)
def _family(graph: Graph) -> tuple[Candidate, ...]:
    plain = keep_everything(graph)
    if not graph.nodes:
        return trade_off(graph, [plain])
    step = pack_step(graph)
    top = simulate(graph, plain).peak_bytes
    low = min(int(step.highest_bytes.max()), top)
    # Denser where memory is short; below `low` no backward fits.
    shares: list[float] = (np.linspace(0.0, 1.0, _NUM_LIMITS) ** 1.5).tolist()
    limits = [low + int(share * (top - low)) for share in shares]
    attempts = (evict(step, limit, _MOST_RUNS * len(graph.nodes)) for limit in limits)
    return trade_off(graph, [plain, *(with_liveness(graph, found) for found in attempts if found is not None)])
