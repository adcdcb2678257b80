"""Lower sets of a graph: the abstract recomputation problem of Kusumoto et al. and the families it is searched over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ...schedules.edges import topological_order

Family = Literal["all", "pruned"]

MAXIMUM_LOWER_SETS = 1 << 16
"""Lower sets that an enumeration may find before it gives up: at that number the dynamic program is out of reach."""


@dataclass(frozen=True, slots=True)
class LowerSetProblem:
    """Nodes with a forward time and a memory cost each, and the edges between them; checked on construction.

    Paper symbols: T_v = `times[v]`, M_v = `memories[v]`, (v, w) ∈ E if w reads v.

    Attributes:
        times: Forward time of each node, in any unit.
        memories: Memory of each node, in any unit.
        edges: Pairs (v, w): w reads the output of v. Node numbers need not be a topological order.

    Raises:
        ValueError: Lengths differ, a cost is negative, an edge names no node, or the edges make a cycle.

    Reference: Kusumoto et al. 2019, section 2.
    """

    times: tuple[float, ...]
    memories: tuple[float, ...]
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", tuple(self.times))
        object.__setattr__(self, "memories", tuple(self.memories))
        object.__setattr__(self, "edges", tuple(dict.fromkeys((v, w) for v, w in self.edges)))
        count = len(self.times)
        if len(self.memories) != count:
            raise ValueError(f"{count} times but {len(self.memories)} memories: give one of each for every node")
        for label, costs in (("times", self.times), ("memories", self.memories)):
            for v, cost in enumerate(costs):
                if not 0 <= cost < float("inf"):
                    raise ValueError(f"{label}[{v}] is {cost}, but a cost is finite and not negative")
        topological_order(count, self.edges)


def masks(count: int, edges: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """For each node its predecessors δ⁻(v) and its successors δ⁺(v), as bit masks."""
    before, after = [0] * count, [0] * count
    for v, w in edges:
        before[w] |= 1 << v
        after[v] |= 1 << w
    return before, after


def members(mask: int) -> Iterator[int]:
    """The nodes of a bit mask, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def all_lower_sets(
    count: int, edges: Sequence[tuple[int, int]], *, window: int | None = None, limit: int = MAXIMUM_LOWER_SETS
) -> list[int] | None:
    """All lower sets as bit masks, by ascending size, from ∅ to V; None if there are more than `limit`.

    Args:
        count: Number of nodes.
        edges: Pairs (v, w): w reads v.
        window: None for all. Else only those near the execution order (the order of the node numbers, which must
            be topological): no member stands more than `window` places behind a node left out.
        limit: The most lower sets to find.
    """
    before, after = masks(count, edges)
    start = sum(1 << v for v in range(count) if not before[v])
    layer = {0: start}
    found = [0]
    while layer:
        following: dict[int, int] = {}
        for lower_set, ready in layer.items():
            allowed = ready
            if window is not None:
                left_out = ~lower_set
                first = (left_out & -left_out).bit_length() - 1
                allowed &= (1 << (first + window + 1)) - 1
            for v in members(allowed):
                larger = lower_set | 1 << v
                if larger not in following:
                    new = sum(1 << w for w in members(after[v]) if not before[w] & ~larger)
                    following[larger] = ready & ~(1 << v) | new
            if len(found) + len(following) > limit:
                return None
        found += following
        layer = following
    return found


def pruned_lower_sets(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The pruned family {Lᵥ} with ∅ and V, as bit masks by ascending size; Lᵥ is v with all that v depends on.

    V itself is no Lᵥ in a graph with several sinks, yet every sequence ends with it.

    Reference: Kusumoto et al. 2019, section 4.3.
    """
    family = {0, (1 << count) - 1, *ancestors(count, edges)}
    return sorted(family, key=lambda mask: (mask.bit_count(), mask))


def ancestors(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """For each node v the bit mask of Lᵥ: v and every node from which v can be reached."""
    before, _ = masks(count, edges)
    result = [0] * count
    for v in topological_order(count, edges):
        result[v] = 1 << v
        for u in members(before[v]):
            result[v] |= result[u]
    return result


def near_lower_sets(count: int, edges: Sequence[tuple[int, int]], limit: int) -> tuple[list[int], int | None]:
    """All lower sets if there are at most `limit`, else those within the widest window that has as few.

    Independent branches multiply the lower sets of a graph; those far from the execution order describe segments
    that no schedule in that order runs.

    Returns:
        The family as `all_lower_sets` gives it, and the window, None where all lower sets are in it.
    """
    family = all_lower_sets(count, edges, limit=limit)
    if family is not None:
        return family, None
    narrow, wide = 0, count  # a window of 0 leaves the count + 1 prefixes
    best = all_lower_sets(count, edges, window=0, limit=count + 1)
    assert best is not None, "the prefixes of a topological order are lower sets"
    while wide - narrow > 1:
        window = (narrow + wide) // 2
        family = all_lower_sets(count, edges, window=window, limit=limit)
        if family is None:
            wide = window
        else:
            narrow, best = window, family
    return best, narrow
