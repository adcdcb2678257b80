"""Segments of about equal memory between splitting points: sublinear memory for one more forward."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from math import inf, sqrt
from typing import NamedTuple

from ..lowering import lower_kept
from ..schedules.edges import articulation_points
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ..schedules.storages import StorageGraph, merge_views, nodes_of
from ._candidates import Candidate, fastest_that_fits, trade_off


class MirrorPlan(NamedTuple):
    """What Algorithm 3 returns.

    Attributes:
        x: Approximate cost to store the feature maps between segments.
        y: Approximate cost of the costliest segment that ends at a splitting point.
        m: For each node 0 if its result is kept, 1 if it is dropped and recomputed.
    """

    x: float
    y: float
    m: tuple[int, ...]


def solve(sizes: Sequence[float], candidates: Collection[int], budget: float) -> MirrorPlan:
    """The greedy split: a segment ends at the first candidate at which it holds more than `budget`.

    >>> solve([1, 1, 1, 1, 1, 1], {1, 3, 5}, budget=1)
    MirrorPlan(x=3, y=2, m=(1, 0, 1, 0, 1, 0))

    Args:
        sizes: Size of the output of each node, in topological order.
        candidates: The nodes at which a segment may end (C of the paper).
        budget: Approximate memory of a segment (B).

    Raises:
        ValueError: A size or the budget is negative, or a candidate is no node.

    Reference: Chen et al. 2016, Algorithm 3.
    """
    for v, size in enumerate(sizes):
        if not size >= 0:
            raise ValueError(f"sizes[{v}] is {size}, but memory is not negative")
    if not budget >= 0:
        raise ValueError(f"budget is {budget}, expected memory that is not negative")
    for v in candidates:
        if not 0 <= v < len(sizes):
            raise ValueError(f"candidate {v} is no node; the nodes are 0 to {len(sizes) - 1}")
    chosen = set(candidates)
    held: float = 0  # temp
    x: float = 0
    y: float = 0
    m: list[int] = []
    for v, size in enumerate(sizes):
        held += size
        if v in chosen and held > budget:
            x += size
            y = max(y, held)
            m.append(0)
            held = 0
        else:
            m.append(1)
    return MirrorPlan(x, y, tuple(m))


def search(sizes: Sequence[float], candidates: Collection[int], *, num_budgets: int = 6) -> Iterator[MirrorPlan]:
    """The plans of the paper's search over B: 0, √(xy) of that plan, and a grid on [B/√2, √2·B] around it.

    Args:
        sizes: As of `solve`.
        candidates: As of `solve`.
        num_budgets: Size of the grid.

    Reference: Chen et al. 2016, Appendix A.
    """
    finest = solve(sizes, candidates, 0)
    yield finest
    middle = sqrt(finest.x * finest.y)
    yield solve(sizes, candidates, middle)
    for step in range(num_budgets):
        share = step / (num_budgets - 1) if num_budgets > 1 else 0.5
        yield solve(sizes, candidates, middle * 2 ** (share - 0.5))


def plan_chen(graph: Graph, budget_bytes: int) -> Schedule:
    """The fastest plan of Algorithm 3, over its internal budget B, that fits.

    Segments end at articulation points of the graph's storages (where all paths meet, among others), whose results
    are kept; the last segment, whose backward follows at once, is kept or not. Simulated are the plans of Appendix A
    and at most 64 of the distinct plans that other values of B give. They depend on the graph alone, so that more
    budget never makes the answer slower.

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.

    Returns:
        A schedule whose simulated peak is within the budget.

    Raises:
        InfeasibleBudgetError: None of these plans fits.

    Reference: Chen et al. 2016, section 4.3, Algorithm 3, Appendix A; Kusumoto et al. 2019, Appendix B (the
    splitting points).
    """
    return fastest_that_fits(graph, budget_bytes, _family(graph), planner="chen")


_MOST_PLANS = 64


@lru_cache(maxsize=8)
def _family(graph: Graph) -> tuple[Candidate, ...]:
    storages = merge_views(graph)
    candidates = articulation_points(len(storages.owners), storages.edges)
    distinct = {plan.m for plan in _every_plan(storages.sizes, candidates)}
    swept = sorted(distinct, key=sum)  # by the number of results dropped
    step = max(1, -(-len(swept) // _MOST_PLANS))
    schedules: dict[Schedule, None] = {}
    for m in dict.fromkeys([*swept[::step], swept[-1], *(plan.m for plan in search(storages.sizes, candidates))]):
        schedules |= dict.fromkeys(mirrored(graph, storages, m))
    return trade_off(graph, schedules)


def mirrored(graph: Graph, storages: StorageGraph, m: Sequence[int]) -> Iterator[Schedule]:
    """The schedules of a `MirrorPlan.m`: with the last segment, whose backward follows at once, kept and not."""
    kept = {v for v, count in enumerate(m) if not count}
    last = set(range(max(kept, default=-1) + 1, len(m)))
    yield lower_kept(graph, nodes_of(storages, kept | last))
    yield lower_kept(graph, nodes_of(storages, kept))


def _every_plan(sizes: Sequence[float], candidates: Collection[int]) -> Iterator[MirrorPlan]:
    """Algorithm 3's plan for every B: it changes only where B reaches what some segment holds at its end."""
    budget: float = 0
    while True:
        plan = solve(sizes, candidates, budget)
        yield plan
        held: float = 0
        least = inf  # of what the segments hold at their ends
        for size, count in zip(sizes, plan.m, strict=True):
            held += size
            if not count:
                least = min(least, held)
                held = 0
        if least == inf:
            return
        budget = least
