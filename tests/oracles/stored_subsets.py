"""Feng's objective by brute force: every set of stored vertices of a small graph."""

from collections.abc import Sequence
from itertools import combinations


def cost_of(costs: Sequence[float], edges: Sequence[tuple[int, int]], stored: set[int]) -> float | None:
    """Equation (1) of feng2018 for one set of stored vertices, or None where the set is not legal.

    What is not stored falls into connected parts; each must hang between one stored source and one stored target.
    """
    rest = set(range(len(costs))) - stored
    largest: float = 0
    while rest:
        part, frontier = set[int](), [rest.pop()]
        while frontier:
            v = frontier.pop()
            part.add(v)
            near = {b for a, b in edges if a == v} | {a for a, b in edges if b == v}
            frontier += near & rest
            rest -= near
        sources = {a for a, b in edges if b in part and a not in part}
        targets = {b for a, b in edges if a in part and b not in part}
        if len(sources) != 1 or len(targets) != 1:
            return None
        largest = max(largest, sum(costs[v] for v in part))
    return sum(costs[v] for v in stored) + largest


def cheapest(costs: Sequence[float], edges: Sequence[tuple[int, int]]) -> float:
    """The least cost over all legal sets that contain the first and the last vertex."""
    inner = range(1, len(costs) - 1)
    options = (
        cost_of(costs, edges, {0, len(costs) - 1, *chosen})
        for size in range(len(inner) + 1)
        for chosen in combinations(inner, size)
    )
    return min(option for option in options if option is not None)
