"""A graph as the arrays that the replay of evictions reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..graph import Graph
from .gradient_levels import gradient_levels

Ints = NDArray[np.int64]


class Step(NamedTuple):
    """A graph as arrays. Lists of nodes are one array `x` with `x_start[n]:x_start[n + 1]` for node n."""

    roots: Ints
    output_bytes: Ints
    tape_bytes: Ints
    workspace_bytes: Ints
    seconds: NDArray[np.float64]
    backward_seconds: NDArray[np.float64]
    reads_start: Ints
    reads: Ints
    users_start: Ints
    users: Ints
    saved_start: Ints
    saved: Ints
    members_start: Ints  # of a root: itself and its views
    members: Ints
    is_output: NDArray[np.bool_]  # the caller holds it from its first run to its backward
    before_bytes: Ints  # all that is alive besides outputs and tapes before the backward of a node
    highest_bytes: Ints  # and at most during it
    fixed_bytes: int


def pack_step(graph: Graph) -> Step:
    """The graph as arrays for `evict`."""
    count = len(graph.nodes)
    fixed = graph.input_bytes + graph.static_bytes
    before, highest = gradient_levels(graph)
    all_reads = [list(dict.fromkeys(graph.reads[n])) for n in range(count)]
    users: list[list[int]] = [[] for _ in range(count)]
    members: list[list[int]] = [[] for _ in range(count)]
    for n in range(count):
        members[graph.roots[n]].append(n)
        for i in all_reads[n]:
            users[i].append(n)
    outputs = set(graph.outputs)
    return Step(
        np.array(graph.roots, np.int64),
        _column(graph, "output_bytes"),
        _column(graph, "tape_bytes"),
        _column(graph, "forward_workspace_bytes"),
        np.array([n.forward_seconds for n in graph.nodes]),
        np.array([n.backward_seconds for n in graph.nodes]),
        *_lists(all_reads),
        *_lists(users),
        *_lists(list(dict.fromkeys(n.saved)) for n in graph.nodes),
        *_lists(members),
        np.array([n in outputs for n in range(count)], np.bool_),
        np.array(before, np.int64) + fixed,
        np.array(highest, np.int64) + fixed,
        fixed,
    )


def _column(graph: Graph, name: str) -> Ints:
    return np.array([getattr(node, name) for node in graph.nodes], np.int64)


def _lists(lists: Iterable[list[int]]) -> tuple[Ints, Ints]:
    listed = list(lists)
    start = np.zeros(len(listed) + 1, np.int64)
    start[1:] = np.cumsum([len(x) for x in listed])
    return start, np.array([i for x in listed for i in x], np.int64)
