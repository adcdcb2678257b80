"""Decisions become schedules: what is kept is written out as actions, and liveness ends each residency.

Planners lower hundreds of schedules to find one, so the functions here are compiled.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from .schedules.arrays import BACKWARD, DISCARD, DISCARD_TAPE, RUN, GraphArrays, decode, encode, graph_arrays
from .schedules.compiled import Flags, Ints, Small, njit
from .schedules.graph import Graph
from .schedules.schedule import Schedule
from .schedules.uses import mark_missing


def lower_kept(graph: Graph, outputs: Collection[int], tapes: Collection[int] | None = None) -> Schedule:
    """The schedule that keeps the given values from forward to backward and recomputes the others at most once.

    A value that is not kept goes after its last use in the forward; when a backward needs it, it is recomputed
    from what is resident, with the discarded values on the way, and stays until its last use.

    Args:
        graph: The operations.
        outputs: The nodes whose output is kept. A view is kept with its storage at no cost and needs no mention.
        tapes: The nodes whose tape is kept; None stands for those in `outputs`.

    Returns:
        A valid schedule with every discard right after the last use.
    """
    arrays = graph_arrays(graph)
    kept = _flags(graph, outputs)
    kept |= kept[arrays.root]
    kept_tapes = kept if tapes is None else _flags(graph, tapes)
    return with_liveness(graph, _keep(arrays, kept, kept_tapes))


def keep_everything(graph: Graph) -> Schedule:
    """The schedule of the plain step."""
    return lower_kept(graph, range(len(graph.nodes)))


def apply_liveness(graph: Graph, schedule: Schedule) -> Schedule:
    """The same schedule with each discard moved to right after the last use of what it discards.

    Reference: Kusumoto et al. 2019, section 5 and Appendix C (liveness analysis).
    """
    return with_liveness(graph, encode(graph, schedule))


def with_liveness(graph: Graph, actions: Small, ends: Ints | None = None) -> Schedule:
    """As `apply_liveness`, for actions as numbers.

    Args:
        graph: The operations.
        actions: Their numbers.
        ends: Where discards may stand: numbers of actions, ascending, the last one of all. None stands for anywhere.
    """
    everywhere = np.empty(0, np.int64)
    return decode(graph, discard_at_last_use(graph_arrays(graph), actions, everywhere if ends is None else ends))


def _flags(graph: Graph, indices: Collection[int]) -> Flags:
    flags = np.zeros(len(graph.nodes), np.bool_)
    flags[[n for n in indices if 0 <= n < len(flags)]] = True
    return flags


@njit
def _keep(arrays: GraphArrays, kept: Flags, kept_tapes: Flags) -> Small:
    """The actions that keep these values; each discard stands where the forward, or all, has ended."""
    count = len(kept)
    codes = np.empty(8 * count, np.int32)
    has_tape = arrays.tape_bytes > 0
    outputs, tapes = kept.copy(), kept_tapes & has_tape
    at = _append(codes, 0, np.arange(count), RUN)
    at = _append(codes, at, np.flatnonzero(~outputs), DISCARD)
    at = _append(codes, at, np.flatnonzero(has_tape & ~tapes), DISCARD_TAPE)
    is_needed = np.zeros(count, np.bool_)
    for n in range(count - 1, -1, -1):
        lowest, highest = mark_missing(arrays, n, outputs, tapes, is_needed)
        for m in range(lowest, highest + 1):
            if is_needed[m]:
                codes[at] = 4 * m + RUN
                at += 1
                outputs[m] = True
                tapes[m] = has_tape[m]
                is_needed[m] = False
        codes[at] = 4 * n + BACKWARD
        at += 1
    at = _append(codes, at, np.flatnonzero(outputs), DISCARD)
    return codes[: _append(codes, at, np.flatnonzero(tapes), DISCARD_TAPE)]


@njit
def _append(codes: Small, at: int, nodes: Ints, kind: int) -> int:
    """Writes the action of a kind of each of the nodes, the first to place `at`; the place after the last."""
    codes[at : at + len(nodes)] = 4 * nodes + kind
    return at + len(nodes)


@njit
def discard_at_last_use(arrays: GraphArrays, codes: Small, ends: Ints) -> Small:
    """The actions with each discard right after the last use of what it discards, or at the first of `ends` then."""
    count = len(arrays.root)
    last_output, last_tape = np.full(count, -1), np.full(count, -1)  # position that last uses the present residency
    discards = np.empty(2 * len(codes), np.int32)
    places = np.empty(2 * len(codes), np.int64)
    num_discards = 0
    is_read = _are_read(arrays, codes)
    for position in range(len(codes)):
        n, kind = codes[position] >> 2, codes[position] & 3
        if kind == RUN:
            for k in range(arrays.read_start[n], arrays.read_start[n + 1]):
                last_output[arrays.read[k]] = position
            # Where it brings back the tape only, what it makes again need not wait for it - but a second copy of a
            # storage that a view or the caller may hold costs more than to keep the first, where it is to stay.
            if last_output[n] >= 0 and not (arrays.is_shared[n] and is_read[position]):
                discards[num_discards], places[num_discards] = 4 * n + DISCARD, last_output[n]
                num_discards += 1
            last_output[n] = position
            if arrays.tape_bytes[n] > 0:
                if last_tape[n] >= 0:
                    discards[num_discards], places[num_discards] = 4 * n + DISCARD_TAPE, last_tape[n]
                    num_discards += 1
                last_tape[n] = position
        elif kind == BACKWARD:
            for k in range(arrays.saved_start[n], arrays.saved_start[n + 1]):
                last_output[arrays.saved[k]] = position
            if arrays.tape_bytes[n] > 0:
                last_tape[n] = position
        else:
            last = last_output if kind == DISCARD else last_tape
            discards[num_discards] = codes[position]
            places[num_discards] = last[n] if last[n] >= 0 else position
            num_discards += 1
            last[n] = -1
    places = places[:num_discards]
    if len(ends) > 0:
        places = ends[np.searchsorted(ends, places + 1)] - 1
    order = np.argsort(places, kind="mergesort")
    lowered = np.empty(len(codes) + num_discards, np.int32)
    at, done = 0, 0
    for position in range(len(codes)):
        if codes[position] & 3 <= BACKWARD:
            lowered[at] = codes[position]
            at += 1
        while done < num_discards and places[order[done]] == position:
            lowered[at] = discards[order[done]]
            at += 1
            done += 1
    return lowered[:at]


@njit
def _are_read(arrays: GraphArrays, codes: Small) -> Flags:
    """Of each run, whether its output is read while it is resident, also after later runs for the tape alone."""
    is_read, is_wanted = np.zeros(len(codes), np.bool_), np.zeros(len(arrays.root), np.bool_)
    for position in range(len(codes) - 1, -1, -1):
        n, kind = codes[position] >> 2, codes[position] & 3
        if kind == RUN:
            is_read[position] = is_wanted[n]
            is_wanted[arrays.read[arrays.read_start[n] : arrays.read_start[n + 1]]] = True
        elif kind == BACKWARD:
            is_wanted[arrays.saved[arrays.saved_start[n] : arrays.saved_start[n + 1]]] = True
        elif kind == DISCARD:
            is_wanted[n] = False
    return is_read
