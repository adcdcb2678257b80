"""A graph and a schedule as arrays, for the compiled functions."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .compiled import Flags, Floats, Ints, Small
from .graph import Graph
from .schedule import Action, Schedule

KINDS = ("F", "B", "D", "T")
RUN, BACKWARD, DISCARD, DISCARD_TAPE = range(4)
"""Action `kind` of node n is the number 4 * n + kind."""


class GraphArrays(NamedTuple):
    """What is read, saved and held; rows i of `read` are `read[read_start[i] : read_start[i + 1]]`."""

    root: Ints  # [n] owner of the storage of the output
    base: Ints  # [n] whose output a view shares, or -1
    output_bytes: Ints
    tape_bytes: Ints
    workspace_bytes: Ints  # of a forward run
    seconds: Floats  # of a forward run
    is_shared: Flags  # whether views or the caller live in a root's storage
    is_output: Flags  # whether the caller holds it until its backward
    read_start: Small  # [n + 1], what a run reads
    read: Small
    saved_start: Small  # [n + 1], what a backward reads
    saved: Small
    is_held: Flags  # of each entry of `saved`, whether autograd holds the tensors that the operation returned
    is_tape_held: Flags  # of each node
    member_start: Small  # [n + 1], for each root itself and the views of it
    member: Small


@lru_cache(maxsize=8)
def graph_arrays(graph: Graph) -> GraphArrays:
    """The graph as arrays, remembered for the last few."""
    nodes, roots = graph.nodes, graph.roots
    shared = {roots[n] for n, node in enumerate(nodes) if node.is_view or n in graph.outputs}
    members: list[list[int]] = [[] for _ in nodes]
    for n, root in enumerate(roots):
        members[root].append(n)
    return GraphArrays(
        np.array(roots, np.int64),
        np.array([-1 if node.storage_of is None else node.storage_of for node in nodes], np.int64),
        np.array([node.output_bytes for node in nodes], np.int64),
        np.array([node.tape_bytes for node in nodes], np.int64),
        np.array([node.forward_workspace_bytes for node in nodes], np.int64),
        np.array([node.forward_seconds for node in nodes], np.float64),
        np.array([n in shared for n in range(len(nodes))], np.uint8),
        np.array([n in graph.outputs for n in range(len(nodes))], np.uint8),
        *rows(graph.reads[n] for n in range(len(nodes))),
        *rows(node.saved for node in nodes),
        np.array([i in node.held for node in nodes for i in dict.fromkeys(node.saved)], np.uint8),
        np.array([node.is_tape_held for node in nodes], np.uint8),
        *rows(members),
    )


def rows(lists: Iterable[Iterable[int]]) -> tuple[Small, Small]:
    """Rows of different lengths as one array, without repetitions: the start of each and of what would follow; all."""
    flat: list[int] = []
    start = [0]
    for row in lists:
        flat.extend(dict.fromkeys(row))
        start.append(len(flat))
    return np.array(start, np.int32), np.array(flat, np.int32)


_actions: list[Action] = []
_codes: dict[Action, int] = {}
_growing = threading.Lock()


def _know(num_nodes: int) -> None:
    """Lets the tables reach to that many nodes."""
    with _growing:
        for n in range(len(_actions) // 4, num_nodes):
            for kind in KINDS:
                action = Action(kind, n)
                _codes[action] = len(_actions)
                _actions.append(action)


def encode(graph: Graph, schedule: Schedule) -> Small:
    """The numbers of the actions of a schedule."""
    _know(len(graph.nodes))
    return np.fromiter(map(_codes.__getitem__, schedule.actions), np.int32, len(schedule))


def decode(graph: Graph, codes: Small) -> Schedule:
    """The schedule of the actions with these numbers."""
    _know(len(graph.nodes))
    numbers: list[int] = codes.tolist()
    return Schedule(tuple(map(_actions.__getitem__, numbers)))
