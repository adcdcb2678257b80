"""A graph seen as storages: what the papers' models call the nodes, with views merged into what they view."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .graph import Graph


@dataclass(frozen=True, slots=True)
class StorageGraph:
    """The storages of a graph in its order, each with the node that makes it and the views of it.

    Attributes:
        owners: The node that makes each storage.
        place: For each node, the storage that its output lives in.
        sizes: Bytes that a run leaves: output and tape.
        seconds: Time of a forward run, that of the views included.
        edges: Pairs (a, b), a < b: making b reads a, directly or through views.
    """

    owners: tuple[int, ...]
    place: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    edges: tuple[tuple[int, int], ...]


def merge_views(graph: Graph) -> StorageGraph:
    """The storages of `graph`. What a view reads besides its base becomes an input of the view's users."""
    owners = tuple(n for n, root in enumerate(graph.roots) if root == n)
    position = {n: p for p, n in enumerate(owners)}
    place = tuple(position[root] for root in graph.roots)
    sizes = [0] * len(owners)
    seconds = [0.0] * len(owners)
    edges: dict[tuple[int, int], None] = {}
    behind: list[set[int]] = []  # the storages that a reader of each node depends on
    for n, node in enumerate(graph.nodes):
        reads = {place[n]} if node.is_view else set[int]()
        for i in node.inputs:
            reads |= behind[i]
        sizes[place[n]] += node.output_bytes + node.tape_bytes
        seconds[place[n]] += node.forward_seconds
        if not node.is_view:
            edges.update(((a, place[n]), None) for a in sorted(reads))
        behind.append(reads if node.is_view else {place[n]})
    return StorageGraph(owners, place, tuple(sizes), tuple(seconds), tuple(edges))


def articulation_points(count: int, edges: Iterable[tuple[int, int]]) -> set[int]:
    """The nodes whose removal disconnects their part of the graph, directions ignored.

    >>> articulation_points(5, [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4)])
    {1}
    """
    near: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        near[a].append(b)
        near[b].append(a)
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


def nodes_of(storages: StorageGraph, chosen: Iterable[int]) -> set[int]:
    """The nodes whose output lives in one of the chosen storages."""
    wanted = set(chosen)
    return {n for n, p in enumerate(storages.place) if p in wanted}
