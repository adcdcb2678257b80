"""Which gap to drop or to hold next: guesses first, replays of the most promising, all of it compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...schedules.compiled import Flags, Floats, Ints, Small, njit
from .intervals import END, HELD, START, excess_of, find_room, list_gaps, try_gaps, with_twins
from .window_simulator import Problem, Work

BATCH = 12
"""Moves tried at a time, best guess first."""

MAX_DROPS_TRIED = 4 * BATCH

LEAST_SECONDS = 1e-9

ALMOST = 0.9
"""Moves as good as that share of the best may be made with it."""

_NUM_CELLS = 1 << 14


class Memory(NamedTuple):
    """Seconds that moves were worth when last tried: an open hash table, emptied when it is half full."""

    keys: Ints  # [cells], 0 where empty
    values: Floats
    size: Ints  # [1]


class Chosen(NamedTuple):
    """Moves, the best first."""

    rows: Small
    num_replayed: int
    """Actions replayed to find out."""


def empty_memory() -> Memory:
    """A memory of nothing."""
    return Memory(np.zeros(_NUM_CELLS, np.int64), np.zeros(_NUM_CELLS, np.float64), np.zeros(1, np.int64))


@njit
def forget(memory: Memory) -> None:
    """Empties the memory."""
    if memory.size[0]:
        memory.keys[:] = 0
        memory.size[0] = 0


@njit
def recall(memory: Memory, row: Small, otherwise: float) -> float:
    """What was remembered of a move, or `otherwise`."""
    cell = _cell(memory, _key(row))
    return memory.values[cell] if memory.keys[cell] else otherwise


@njit
def remember(memory: Memory, row: Small, value: float) -> None:
    """Notes what a move is worth."""
    key = _key(row)
    cell = _cell(memory, key)
    if not memory.keys[cell]:
        if 2 * memory.size[0] >= len(memory.keys):
            forget(memory)
            cell = _cell(memory, key)
        memory.keys[cell] = key
        memory.size[0] += 1
    memory.values[cell] = value


@njit
def _key(row: Small) -> int:
    key = np.int64(1469598103934665603)
    for k in range(8):
        key = (key ^ np.int64(row[k])) * np.int64(1099511628211)
        key ^= key >> np.int64(29)
    return int(key) if key else 1


@njit
def _cell(memory: Memory, key: int) -> int:
    mask = len(memory.keys) - 1
    cell = key & mask
    while memory.keys[cell] and memory.keys[cell] != key:
        cell = (cell + 1) & mask
    return int(cell)


@njit
def list_drops(problem: Problem, work: Work, num_actions: int, limit: int) -> tuple[Small, Floats, Floats]:
    """Held gaps over steps above the limit, the most that each may free there, and the seconds of a run."""
    found = list_gaps(problem, work, num_actions)
    rows, sizes, seconds = with_twins(found[0], found[1], found[2], len(problem.is_pinned))
    steps = len(work.most)
    total, above = np.zeros(steps + 1), np.zeros(steps + 1, np.int64)
    for k in range(steps):
        over = max(0, work.most[k] - limit)
        total[k + 1] = total[k] + over
        above[k + 1] = above[k] + (over > 0)
    gains = np.zeros(len(rows))
    for k in range(len(rows)):
        if rows[k, HELD]:
            start, end = rows[k, START] + 2 - rows[k, HELD], rows[k, END]
            gains[k] = min(float(sizes[k] * (above[end] - above[start])), total[end] - total[start])
    is_useful = gains > 0
    return rows[is_useful], gains[is_useful], seconds[is_useful]


@njit
def choose_drops(
    problem: Problem,
    windows: Small,
    work: Work,
    memory: Memory,
    seconds: float,
    num_actions: int,
    limit: int,
    most: int,
) -> Chosen:
    """The held gaps that free the most bytes above the limit for a second: the best, and others almost as good.

    `work` is that of the replay of `windows`. Nothing is chosen where no single drop lowers the excess.
    """
    excess = excess_of(work, limit)
    rows, gains, guesses = list_drops(problem, work, num_actions, limit)
    worth = np.empty(len(rows))
    for k in range(len(rows)):
        worth[k] = gains[k] / max(recall(memory, rows[k], guesses[k]), LEAST_SECONDS)
    order = np.argsort(-worth, kind="mergesort")[:MAX_DROPS_TRIED]
    values, lowered = np.zeros(len(order)), np.zeros(len(order))
    best, replayed = 0.0, 0
    for at in range(0, len(order), BATCH):
        chosen = order[at : at + BATCH]
        if best >= worth[chosen[0]]:
            break
        _, new_seconds, new_excess, count = try_gaps(problem, windows, work, rows[chosen], limit)
        replayed += count
        for k in range(len(chosen)):
            cost = max(new_seconds[k] - seconds, LEAST_SECONDS)
            remember(memory, rows[chosen[k]], cost)
            lowered[at + k] = excess - new_excess[k]
            values[at + k] = lowered[at + k] / cost
            best = max(best, values[at + k])
    ranked = _almost_best(values, 0.0, most)
    size = 0
    while size < len(ranked) and excess > 0:
        excess -= lowered[ranked[size]]
        size += 1
    return Chosen(rows[order[ranked[:size]]], replayed)


@njit
def _almost_best(values: Floats, least: float, most: int) -> Ints:
    """Places of the best value above `least` and of others almost as good, at most so many, the best first."""
    ranked = np.argsort(-values, kind="mergesort")[:most]
    size = 0
    while size < len(ranked) and values[ranked[size]] > least and values[ranked[size]] >= ALMOST * values[ranked[0]]:
        size += 1
    return ranked[:size]


@njit
def choose_holds(
    problem: Problem,
    windows: Small,
    work: Work,
    memory: Memory,
    seconds: float,
    num_actions: int,
    limit: int,
    most: int,
    most_actions: int,
) -> Chosen:
    """The absent gaps that save the most seconds when held within the limit: the best, and others almost as good.

    After `most_actions` replayed actions no more are tried: where little fits, all the thousands of a deep graph were.
    """
    found = list_gaps(problem, work, num_actions)
    rows, sizes, guesses = with_twins(found[0], found[1], found[2], len(problem.is_pinned))
    has_room: Flags = find_room(rows, sizes, work, limit)
    rows, guesses = rows[has_room], guesses[has_room]
    worth = np.empty(len(rows))
    for k in range(len(rows)):
        worth[k] = recall(memory, rows[k], guesses[k])
    order = np.argsort(-worth, kind="mergesort")
    saved = np.zeros(len(order))
    best, replayed = LEAST_SECONDS, 0
    for at in range(0, len(order), BATCH):
        chosen = order[at : at + BATCH]
        if best >= worth[chosen[0]] or replayed >= most_actions:
            break
        peaks, new_seconds, _, count = try_gaps(problem, windows, work, rows[chosen], limit)
        replayed += count
        for k in range(len(chosen)):
            if peaks[k] <= limit:
                saved[at + k] = seconds - new_seconds[k]
            remember(memory, rows[chosen[k]], saved[at + k])
            best = max(best, saved[at + k])
    ranked = _almost_best(saved, LEAST_SECONDS, most)
    return Chosen(rows[order[ranked]], replayed)
