"""Equal segments: only what crosses a segment's end is kept (PyTorch's `checkpoint_sequential`); or all is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from ..lowering import keep_everything, lower_kept
from ..schedules.compiled import Ints
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ._candidates import Candidate, fastest_that_fits, trade_off


def plan_periodic(graph: Graph, budget_bytes: int, *, segments: int | None = None) -> Schedule:
    """The fastest cut into segments of equally many nodes that fits the budget.

    What a later segment reads is kept; the rest of every segment but the last is recomputed once in its backward.
    The cost is one simulation for each number of segments tried.

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.
        segments: How many segments; None tries every number from 1 (keep all) to 2·√n and some beyond.

    Returns:
        A schedule whose simulated peak is within the budget.

    Raises:
        InfeasibleBudgetError: No number of segments fits.
        ValueError: `segments` is not between 1 and the number of nodes.

    Reference: Chen et al. 2016, section 4.1, Algorithm 1; Beaumont et al. 2024, section 5.4 ("periodic").
    """
    count = len(graph.nodes)
    if segments is not None and not 1 <= segments <= max(1, count):
        raise ValueError(f"segments is {segments}, but a graph of {count} nodes has 1 to {count}")
    return fastest_that_fits(graph, budget_bytes, _family(graph, segments), planner="periodic")


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
    return fastest_that_fits(graph, budget_bytes, trade_off(graph, [keep_everything(graph)]), planner="keep_all")


@lru_cache(maxsize=8)
def _family(graph: Graph, segments: int | None) -> tuple[Candidate, ...]:
    numbers = _segment_counts(len(graph.nodes)) if segments is None else (segments,)
    last_users = np.array([max(users, default=n) for n, users in enumerate(graph.users)], np.int64)
    return trade_off(graph, (lower_kept(graph, _boundary(graph, last_users, k)) for k in numbers))


def _segment_counts(count: int) -> Iterator[int]:
    """All numbers of segments to 2·√n, about where the lowest peak lies, then ever larger steps to n."""
    k = 1
    dense = 2 * math.isqrt(count) + 1
    while k <= max(1, count):
        yield k
        k += 1 if k < dense else math.ceil(k / 8)


def _boundary(graph: Graph, last_users: Ints, segments: int) -> set[int]:
    """What is kept: outputs that a later segment reads, and the whole last segment."""
    count = len(graph.nodes)
    segment = np.arange(count) * segments // max(1, count)
    crossing: list[int] = np.flatnonzero(segment[last_users] > segment).tolist()
    return {graph.roots[n] for n in crossing}.union(np.flatnonzero(segment == segments - 1).tolist())
