"""Graphs as numbers of nodes and pairs of them: orders, connected parts, articulation points, dominators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from graphlib import CycleError, TopologicalSorter
from typing import Any

import networkx  # pyright: ignore[reportMissingTypeStubs]

nx: Any = networkx  # its functions carry no types


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


def undirected(nodes: Iterable[int], edges: Iterable[tuple[int, int]]) -> Any:
    """The graph of networkx in which `graph[v]` are those at the other ends of v's edges; edges to others are left out.

    Args:
        nodes: Its nodes.
        edges: Pairs of nodes, of which the directions are ignored.
    """
    graph = nx.Graph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from((a, b) for a, b in edges if a in graph and b in graph)
    return graph


def connected_parts(nodes: Iterable[int], edges: Iterable[tuple[int, int]]) -> list[set[int]]:
    """The nodes in sets between which no edge lies, directions ignored; edges to other nodes do not count.

    >>> connected_parts([0, 1, 2, 4], [(0, 2), (2, 3), (3, 4)])
    [{0, 2}, {1}, {4}]
    """
    return list(nx.connected_components(undirected(nodes, edges)))


def articulation_points(count: int, edges: Iterable[tuple[int, int]]) -> set[int]:
    """The nodes whose removal disconnects their part of the graph, directions ignored.

    >>> articulation_points(5, [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4)])
    {1}
    """
    return set(nx.articulation_points(undirected(range(count), edges)))


def dominators(edges: Iterable[tuple[int, int]], source: int) -> Callable[[int], list[int]]:
    """Tells of each node those that all paths from the source to it meet on the way, the source first.

    >>> dominators([(0, 1), (1, 2), (1, 3), (2, 3)], source=0)(3)
    [0, 1]

    Args:
        edges: Pairs (from, to).
        source: From which all nodes are reached.
    """
    nearest: dict[int, int] = nx.immediate_dominators(nx.DiGraph(edges), source)

    def of(v: int) -> list[int]:
        found: list[int] = []
        while v != source:
            v = nearest[v]
            found.append(v)
        return found[::-1]

    return of
