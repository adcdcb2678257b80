"""Several gaps at once: what to hold instead of what, as in a knapsack at the fullest step.

Near the optimum no single move pays any more, but two small values may save more than the large one in whose room
they fit. The costs here are guesses from single runs; a replay decides.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...schedules.compiled import Flags, Floats, Ints, Small, njit
from .intervals import END, HELD, START, VALUE, list_gaps, with_twins
from .moves import LEAST_SECONDS, Memory, recall
from .window_simulator import Problem, Work

MOST_HELD, MOST_DROPPED = 60, 90
"""Gaps of either kind that sets of one or two are made of: the best in seconds a byte."""


@njit
def propose(
    problem: Problem, work: Work, guesses: Memory, num_actions: int, limit: int, most: int
) -> tuple[Small, int]:
    """Exchanges by falling guessed gain: [k, 4, 8] two gaps to drop, then two to hold, -1 for none.

    `work` is that of the replay of the present windows. The second result is how many sets were compared.
    """
    found = list_gaps(problem, work, num_actions)
    rows, sizes, seconds = with_twins(found[0], found[1], found[2], len(problem.is_pinned))
    highest = int(work.most.argmax())
    room = limit - work.most[highest]
    first = rows[:, START] + 2 - np.maximum(rows[:, HELD], 1)  # step whose memory the gap changes
    is_over: Flags = (first <= highest) & (rows[:, END] > highest) & (sizes > 0)
    for k in range(len(rows)):
        if rows[k, HELD]:
            seconds[k] = recall(guesses, rows[k], seconds[k])
    ratio = seconds / np.maximum(sizes, 1)
    dropped = np.flatnonzero(is_over & (rows[:, HELD] > 0))
    dropped = dropped[np.argsort(ratio[dropped], kind="mergesort")[:MOST_DROPPED]]
    absent = np.flatnonzero(is_over & (rows[:, HELD] == 0))
    absent = absent[np.argsort(-ratio[absent], kind="mergesort")[:MOST_HELD]]
    out, out_bytes, out_seconds = _sets(rows, dropped, sizes, seconds)
    held, held_bytes, held_seconds = _sets(rows, absent, sizes, seconds)
    if len(out) == 0 or len(held) == 0:
        return np.empty((0, 4, 8), np.int32), 0
    order = np.argsort(-out_bytes, kind="mergesort")
    cheapest = np.empty(len(order), np.int64)  # of the sets that free at least as much
    best = order[0]
    for k in range(len(order)):
        if out_seconds[order[k]] < out_seconds[best]:
            best = order[k]
        cheapest[k] = best
    falling = -out_bytes[order]
    gains, partners = np.zeros(len(held)), np.zeros(len(held), np.int64)
    for k in range(len(held)):
        # How many of the sets free enough.
        freeing: Any = np.searchsorted(falling, room - held_bytes[k], side="right")  # pyright: ignore[reportUnknownVariableType]
        if freeing > 0 and held_bytes[k] > room:
            partners[k] = cheapest[freeing - 1]
            gains[k] = held_seconds[k] - out_seconds[partners[k]]
    ranked = np.argsort(-gains, kind="mergesort")[:most]
    ranked = ranked[gains[ranked] > LEAST_SECONDS]
    moves = np.full((len(ranked), 4, 8), -1, np.int32)
    for at in range(len(ranked)):
        for k in range(2):
            if out[partners[ranked[at]], k] >= 0:
                moves[at, k] = rows[out[partners[ranked[at]], k]]
            if held[ranked[at], k] >= 0:
                moves[at, 2 + k] = rows[held[ranked[at], k]]
    return moves, len(out) + len(held)


@njit
def _sets(rows: Small, members: Ints, sizes: Ints, seconds: Floats) -> tuple[Ints, Ints, Floats]:
    """All sets of one or two of the gaps, of different values: the gaps (-1 for none), their bytes and seconds."""
    count = len(members)
    sets = np.full((count * (count + 1) // 2, 2), -1, np.int64)
    bytes, times = np.zeros(len(sets), np.int64), np.zeros(len(sets))
    at = 0
    for k in range(count):
        first = members[k]
        sets[at, 0], bytes[at], times[at] = first, sizes[first], seconds[first]
        at += 1
        for j in range(k):
            second = members[j]
            if not _share_a_value(rows[first], rows[second]):
                sets[at, 0], sets[at, 1] = first, second
                bytes[at], times[at] = sizes[first] + sizes[second], seconds[first] + seconds[second]
                at += 1
    return sets[:at], bytes[:at], times[:at]


@njit
def _share_a_value(one: Small, other: Small) -> bool:
    for i in range(VALUE, VALUE + 8, 4):
        for j in range(VALUE, VALUE + 8, 4):
            if one[i] >= 0 and one[i] == other[j]:
                return True
    return False
