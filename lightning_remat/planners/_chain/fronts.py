"""The makespan table of beaumont2024's dynamic programs in exact memory: a step function of memory for each state."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...schedules.compiled import Floats, Ints, njit
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


class _Front(NamedTuple):
    """A step function: from memories[i] on, the makespan is makespans[i]; memories rise, makespans fall strictly."""

    memories: Ints
    makespans: Floats


@njit
def _sum(first: _Front, shift: int, second: _Front, seconds: float, start: int, stop: int) -> _Front:
    """seconds + first(m - shift) + second(m) on [start, stop]."""
    memories = np.empty(len(first.memories) + len(second.memories), dtype=np.int64)
    makespans = np.empty(len(memories), dtype=np.float64)
    size, i, j = 0, 0, 0
    if len(first.memories) == 0 or len(second.memories) == 0:
        return _Front(memories[:0], makespans[:0])
    at = max(start, first.memories[0] + shift, second.memories[0])
    while at <= stop:
        while i + 1 < len(first.memories) and first.memories[i + 1] + shift <= at:
            i += 1
        while j + 1 < len(second.memories) and second.memories[j + 1] <= at:
            j += 1
        memories[size] = at
        makespans[size] = seconds + first.makespans[i] + second.makespans[j]
        size += 1
        after = stop + 1
        if i + 1 < len(first.memories):
            after = min(after, first.memories[i + 1] + shift)
        if j + 1 < len(second.memories):
            after = min(after, second.memories[j + 1])
        at = after
    return _Front(memories[:size], makespans[:size])


@njit
def _least(first: _Front, second: _Front) -> _Front:
    """The pointwise minimum of two step functions."""
    if len(second.memories) == 0:
        return first
    memories = np.empty(len(first.memories) + len(second.memories), dtype=np.int64)
    makespans = np.empty(len(memories), dtype=np.float64)
    size, i, j = 0, 0, 0
    least = np.inf
    while i < len(first.memories) or j < len(second.memories):
        if j == len(second.memories) or (i < len(first.memories) and first.memories[i] <= second.memories[j]):
            at, value = first.memories[i], first.makespans[i]
            i += 1
        else:
            at, value = second.memories[j], second.makespans[j]
            j += 1
        if value < least:
            least = value
            if size > 0 and memories[size - 1] == at:
                size -= 1
            memories[size], makespans[size] = at, value
            size += 1
    return _Front(memories[:size], makespans[:size])


@njit
def _after(fronts: list[_Front], zero: _Front, move: Move, stop: int) -> _Front:
    """What a move leads to, up to `stop`."""
    return _sum(fronts[move.row], move.taken - move.freed, zero, move.seconds, move.needed, stop)


@njit
def _thinned(front: _Front, limit: int) -> _Front:
    if len(front.memories) <= limit:
        return front
    chosen = np.linspace(0, len(front.memories) - 1, limit).astype(np.int64)
    return _Front(front.memories[chosen], front.makespans[chosen])


@njit
def fill_fronts(p: Problem, memory: int, limit: int) -> tuple[Ints, Floats, Ints]:
    """(memories, makespans, bounds): row i of the table is the slice bounds[i, 0] : bounds[i, 1] of the other two.

    Exact where no row has more than `limit` steps. A longer one is thinned to `limit`, its first and last kept: the
    makespans are then of sequences that still fit, and the least memory stays exact.

    Args:
        p: The problem.
        memory: The most memory of interest beyond a^0.
        limit: The most steps a row.

    Returns:
        Two flat arrays, and for each row its first and its last index plus one in them.

    Reference:
        Beaumont et al. 2024, equations (1)-(7).
    """
    n, c = p.num_stages, p.costs
    zero = _Front(np.full(1, -(np.int64(1) << 61)), np.zeros(1))
    none = _Front(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float64))
    fronts = [none for _ in range(p.num_rows)]
    segments = [none for _ in range(n + 1)]
    for s in range(1, n + 1):
        seconds = c.kept_leaf_seconds[s] + c.backward_seconds[s]
        fronts[rest_row(p, s, s, s + 1)] = _Front(np.full(1, kept_leaf_threshold(p, s)), np.full(1, seconds))
    for last in range(1, n + 1):
        for s in range(last, 0, -1):
            # a^0 stays for the whole time, and a^(s-1) beside it (inside a tape, it may be smaller).
            stop = memory if s == 1 else memory - min(c.output[s - 1], c.tape[s - 1])
            for u in range(s + 1, last + 1):
                segments[u] = none
                for k in bases_after(p, s, u):
                    segments[u] = _least(segments[u], _after(fronts, zero, keep_move(p, s, k, u, last), stop))
            for t in ends_until(p, s, last):
                best = none
                if s == last and leaf_threshold(p, s) <= stop:
                    seconds = c.leaf_seconds[s] + c.backward_seconds[s]
                    best = _Front(np.full(1, leaf_threshold(p, s)), np.full(1, seconds))
                elif s < last and s == t and p.keeps_tapes:
                    best = _after(fronts, zero, tape_move(p, s, last), stop)
                for u in range(t + 1, last + 1):
                    best = _least(best, _sum(segments[u], 0, fronts[rest_row(p, s, t, u)], 0.0, 0, stop))
                for r in floats_to(p, s, t):
                    best = _least(best, _after(fronts, zero, float_move(p, s, r, t, last), stop))
                fronts[row(p, s, t, last)] = _thinned(best, limit)
    return _joined(fronts)


@njit
def _joined(fronts: list[_Front]) -> tuple[Ints, Floats, Ints]:
    bounds = np.zeros((len(fronts), 2), dtype=np.int64)
    used = 0
    for i in range(len(fronts)):
        bounds[i, 0], bounds[i, 1] = used, used + len(fronts[i].memories)
        used = bounds[i, 1]
    memories, makespans = np.empty(used, dtype=np.int64), np.empty(used, dtype=np.float64)
    for i in range(len(fronts)):
        memories[bounds[i, 0] : bounds[i, 1]] = fronts[i].memories
        makespans[bounds[i, 0] : bounds[i, 1]] = fronts[i].makespans
    return memories, makespans, bounds
