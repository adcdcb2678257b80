"""A graph seen as storages: what the papers' models call the nodes, with views merged into what they view."""

from __future__ import annotations

from collections.abc import Iterable
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


def nodes_of(storages: StorageGraph, chosen: Iterable[int]) -> set[int]:
    """The nodes whose output lives in one of the chosen storages."""
    wanted = set(chosen)
    return {n for n, p in enumerate(storages.place) if p in wanted}
