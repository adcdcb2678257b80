"""The makespan table of beaumont2024's dynamic programs over uniform memory slots: fast, sizes rounded up to slots."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...schedules.compiled import Floats, Ints, njit, njit_numpy
from .problem import Problem
from .recurrence import (
    Move,
    bases_after,
    ends_until,
    float_move,
    floats_to,
    keep_move,
    kept_leaf_threshold,
    leaf_threshold,
    rest_row,
    row,
    tape_move,
)

# Slots looked at together: a few cache lines.
_RUN = 64


@njit
def slots_of(size: int, slot: int) -> int:
    """Slots that hold `size`: rounded up, so that a planned peak is never exceeded."""
    return -(-size // slot)


@njit
def slots_of_move(move: Move, slot: int) -> tuple[int, int]:
    """Slots that a move needs, and by how many fewer the state that it leads to has."""
    return slots_of(move.needed, slot), slots_of(move.taken, slot) - slots_of(move.freed, slot)


class _Slots(NamedTuple):
    """The table as far as it is filled.

    Attributes:
        table: [rows, slots + 1] makespans.
        first: [rows] the least slots with which a state has a sequence; one more than there are where it has none.
        segment: [slots + 1] scratch.
        slot: Units of memory in a slot.
    """

    table: Floats
    first: Ints
    segment: Floats
    slot: int


@njit_numpy
def _add_segment(best: Floats, seconds: float, above: Floats, below: Floats, start: int, stop: int, shift: int) -> None:
    """best[m] <- min(best[m], seconds + above[m - shift] + below[m]) for m in [start, stop).

    All three fall with m, so that the ends of a run of slots tell whether it can improve anywhere: most cannot, and
    are not read.
    """
    begin = start
    while begin < stop:
        end = min(begin + _RUN, stop)
        if seconds + above[end - 1 - shift] + below[end - 1] < best[begin]:
            out, first, second = best[begin:end], above[begin - shift : end - shift], below[begin:end]
            for i in range(end - begin):
                value = seconds + first[i] + second[i]
                out[i] = value if value < out[i] else out[i]
        begin = end


@njit_numpy
def _add_shifted(best: Floats, seconds: float, source: Floats, start: int, stop: int, shift: int) -> None:
    """best[m] <- min(best[m], seconds + source[m - shift]) for m in [start, stop)."""
    length = stop - start
    if length > 0:
        out, first = best[start:stop], source[start - shift : stop - shift]
        for i in range(length):
            value = seconds + first[i]
            out[i] = value if value < out[i] else out[i]


@njit
def _start(slots: _Slots, move: Move) -> tuple[int, int]:
    """The least slots with which a move leads anywhere, and by how many fewer there are after it."""
    needed, shift = slots_of_move(move, slots.slot)
    return max(needed, shift + slots.first[move.row]), shift


@njit
def _add_move(slots: _Slots, best: Floats, move: Move, stop: int) -> int:
    """What a move leads to, below `stop` slots; the least slots with which it leads anywhere."""
    start, shift = _start(slots, move)
    _add_shifted(best, move.seconds, slots.table[move.row], start, stop, shift)
    return start


@njit
def fill_slots(p: Problem, slot: int, num_slots: int) -> Floats:
    """table[row, m]: the least makespan of a state with m slots beyond a^(s-1); infinite where none fits.

    Exact for sizes that are multiples of `slot`; otherwise the makespan of sequences that fit in m slots. Cost:
    O(L^3 num_slots) for memory-persistent states, up to O(L^4 num_slots) with floating ones.

    Args:
        p: The problem.
        slot: Units of memory in a slot.
        num_slots: The most slots of interest.

    Reference:
        Beaumont et al. 2024, Algorithm 3 with equations (6)-(7), Algorithm 1 with equations (1)-(5).
    """
    n, c = p.num_stages, p.costs
    stop = num_slots + 1
    table = np.empty((p.num_rows, stop), dtype=np.float64)
    slots = _Slots(table, np.empty(p.num_rows, dtype=np.int64), np.empty(stop, dtype=np.float64), slot)
    for s in range(1, n + 1):
        index = rest_row(p, s, s, s + 1)
        lowest = slots_of(kept_leaf_threshold(p, s), slot)
        table[index, :lowest] = np.inf
        table[index, lowest:] = c.kept_leaf_seconds[s] + c.backward_seconds[s]
        slots.first[index] = min(lowest, stop)
    for last in range(1, n + 1):
        # From `plenty` on nothing need be recomputed, and the makespan is the plain one.
        plenty, plain = slots_of(leaf_threshold(p, last), slot), 0.0
        for s in range(last, 0, -1):
            if s < last:
                needed, shift = slots_of_move(tape_move(p, s, last), slot)
                plenty = max(needed, shift + plenty)
            plain += (c.leaf_seconds[s] if s == last else c.forward_seconds[s]) + c.backward_seconds[s]
            own = table[row(p, s, s, last)]
            top = min(stop, plenty) if p.keeps_tapes or s == last else stop
            own[:top] = np.inf
            own[top:] = plain
            ends = ends_until(p, s, last)
            for t in ends[1:]:
                table[row(p, s, t, last)] = np.inf
            if p.keeps_tapes and s < last:
                _add_move(slots, own, tape_move(p, s, last), top)
            _add_kept(p, slots, s, last, ends, top)
            for t in ends:
                best = table[row(p, s, t, last)]
                for r in floats_to(p, s, t):
                    _add_move(slots, best, float_move(p, s, r, t, last), stop)
                lowest = np.int64(0)
                while lowest < stop and best[lowest] == np.inf:
                    lowest += 1
                slots.first[row(p, s, t, last)] = lowest
    return table


@njit
def _add_kept(p: Problem, slots: _Slots, s: int, last: int, ends: Ints, top: int) -> None:
    """Sequences of the states (s, t, l), t of `ends`, that keep an activation for the backwards down to some u > t.

    `top` are the slots from which on state (s, s, l) recomputes nothing.
    """
    table, first, segment, stop = slots.table, slots.first, slots.segment, slots.table.shape[1]
    for u in range(s + 1, last + 1):
        below = ends[: np.searchsorted(ends, u, side="left")]
        keeps = bases_after(p, s, u)
        # With several of both, the part before a^(s-1)'s own turn is summed up once for all t.
        is_shared = len(keeps) > 1 and len(below) > 1
        lowest = stop
        if is_shared:
            segment[:] = np.inf
        for k in keeps:
            move = keep_move(p, s, k, u, last)
            if is_shared:
                lowest = min(lowest, _add_move(slots, segment, move, stop))
                continue
            start, shift = _start(slots, move)
            for t in below:
                rest = rest_row(p, s, t, u)
                begin, end = max(start, first[rest]), top if t == s else stop
                _add_segment(table[row(p, s, t, last)], move.seconds, table[move.row], table[rest], begin, end, shift)
        if is_shared:
            for t in below:
                rest = rest_row(p, s, t, u)
                begin, end = max(lowest, first[rest]), top if t == s else stop
                _add_segment(table[row(p, s, t, last)], 0.0, segment, table[rest], begin, end, 0)
