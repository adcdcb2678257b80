"""Graphs as numbers of nodes and pairs of them: orders, connected parts, articulation points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter


def topological_order(count: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """The nodes in an order in which every edge points forward; of those that may come next, the earliest found.

    >>> topological_order(4, [(3, 1), (1, 0)])
    [2, 3, 1, 0]

    Raises:
        ValueError: The edges make a cycle, or name a node that does not exist.
    """
    sorter = TopologicalSorter[int](dict.fromkeys(range(count), ()))
    for v, w in edges:
        if not (0 <= v < count and 0 <= w < count):
            raise ValueError(f"edge ({v}, {w}) names a node that does not exist; the nodes are 0 to {count - 1}")
        sorter.add(w, v)
    try:
        return list(sorter.static_order())
    except CycleError as error:
        raise ValueError(f"the edges make a cycle: {' → '.join(map(str, error.args[1]))}") from error


def neighbours(nodes: Iterable[int], edges: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """For each node those at the other ends of its edges, directions ignored; edges to other nodes do not count."""
    near: dict[int, list[int]] = {v: [] for v in nodes}
    for a, b in edges:
        if a in near and b in near:
            near[a].append(b)
            near[b].append(a)
    return near


def connected_parts(nodes: Iterable[int], edges: Iterable[tuple[int, int]]) -> list[set[int]]:
    """The nodes in sets between which no edge lies, directions ignored; edges to other nodes do not count.

    >>> connected_parts([0, 1, 2, 4], [(0, 2), (2, 3), (3, 4)])
    [{0, 2}, {1}, {4}]
    """
    near = neighbours(nodes, edges)
    parts: list[set[int]] = []
    while near:
        v = next(iter(near))
        part, stack = {v}, [v]
        while stack:
            for w in near.pop(stack.pop()):
                if w not in part:
                    part.add(w)
                    stack.append(w)
        parts.append(part)
    return parts


def articulation_points(count: int, edges: Iterable[tuple[int, int]]) -> set[int]:
    """The nodes whose removal disconnects their part of the graph, directions ignored.

    >>> articulation_points(5, [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4)])
    {1}
    """
    near = neighbours(range(count), edges)
    depth = [-1] * count
    low = [0] * count  # the least depth that the subtree of a node reaches around it
    found: set[int] = set()
    for root in range(count):
        if depth[root] >= 0:
            continue
        depth[root] = 0
        num_root_branches = 0
        stack: list[tuple[int, int, Iterator[int]]] = [(root, -1, iter(near[root]))]
        while stack:
            v, parent, rest = stack[-1]
            w = next(rest, None)
            if w is None:
                stack.pop()
                if parent >= 0:
                    low[parent] = min(low[parent], low[v])
                    if parent == root:
                        num_root_branches += 1
                    elif low[v] >= depth[parent]:
                        found.add(parent)
            elif depth[w] < 0:
                depth[w] = low[w] = depth[v] + 1
                stack.append((w, v, iter(near[w])))
            elif w != parent:
                low[v] = min(low[v], depth[w])
        if num_root_branches > 1:
            found.add(root)
    return found
