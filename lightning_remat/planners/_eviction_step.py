"""A graph as the arrays that the replay of evictions reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..schedules.arrays import graph_arrays, rows
from ..schedules.compiled import Flags, Floats, Ints, Small
from ..schedules.gradients import gradient_levels
from ..schedules.graph import Graph
from ..schedules.uses import members, readers


class Step(NamedTuple):
    """A graph as arrays. Lists of nodes are one array `x` with `x_start[n]:x_start[n + 1]` for node n."""

    roots: Ints
    output_bytes: Ints
    tape_bytes: Ints
    workspace_bytes: Ints
    seconds: Floats
    backward_seconds: Floats
    reads_start: Small
    reads: Small
    users_start: Small
    users: Small
    saved_start: Small
    saved: Small
    members_start: Small  # of a root: itself and its views
    members: Small
    is_output: Flags  # the caller holds it from its first run to its backward
    before_bytes: Ints  # all that is alive besides outputs and tapes before the backward of a node
    highest_bytes: Ints  # and at most during it
    fixed_bytes: int


def pack_step(graph: Graph) -> Step:
    """The graph as arrays for `evict`."""
    arrays = graph_arrays(graph)
    fixed = graph.input_bytes + graph.static_bytes
    before, highest = gradient_levels(graph)
    return Step(
        arrays.root,
        arrays.output_bytes,
        arrays.tape_bytes,
        arrays.workspace_bytes,
        np.array([n.forward_seconds for n in graph.nodes]),
        np.array([n.backward_seconds for n in graph.nodes]),
        *(arrays.read_start, arrays.read),
        *rows(readers(graph)),
        *(arrays.saved_start, arrays.saved),
        *rows(members(graph)),
        arrays.is_output,
        np.array(before, np.int64) + fixed,
        np.array(highest, np.int64) + fixed,
        fixed,
    )
