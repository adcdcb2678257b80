"""The moves of the local search: between two uses a value is either held or absent, and may change over."""

from __future__ import annotations

import numpy as np

from ...schedules.compiled import Flags, Floats, Ints, Small, njit
from .window_simulator import NONE, NUM_WINDOWS, Problem, Work, replay

VALUE, START, END, HELD = range(4)


@njit
def list_gaps(problem: Problem, work: Work, num_actions: int) -> tuple[Small, Ints, Floats]:
    """Every gap between two uses of a value in the schedule just replayed.

    Returns:
        Rows (value, step of the earlier use, step of the later use, how the value is held between: 0 not at all, 1 from
        the end of the earlier step, 2 from within it, after whose runs the step's own action does not need it); the
        value's bytes; the seconds of the run that makes it again.
    """
    arrays, count = problem.arrays, len(problem.is_pinned)
    rows = np.empty((4 * num_actions + 16, 4), np.int32)
    sizes = np.empty(4 * num_actions + 16, np.int64)
    used: Small = np.full(2 * count, -1, np.int32)  # step of the next use
    made: Small = np.full(2 * count, -1, np.int32)  # step of the next run, where no use comes before it
    found = 0
    for at in range(num_actions - 1, -1, -1):
        a, step = work.action[at], work.step[at]
        held = 2 if at + 1 < num_actions and work.step[at + 1] == step else 1
        if a >= 0:
            first, last, needs = arrays.read_start[a], arrays.read_start[a + 1], arrays.read
            for v in range(a, a + count + 1, count):
                is_tape = v >= count
                if arrays.tape_bytes[a] == 0 if is_tape else arrays.root[a] != a or problem.is_pinned[a]:
                    continue
                other = used[v] if used[v] >= 0 else made[v]
                if other > step and found < len(rows):
                    rows[found, VALUE], rows[found, START], rows[found, END] = v, step, other
                    rows[found, HELD] = held if used[v] >= 0 else 0
                    sizes[found] = arrays.tape_bytes[a] if is_tape else arrays.output_bytes[a]
                    found += 1
                used[v] = -1
                made[v] = step
        else:
            n = -1 - a
            first, last, needs = arrays.saved_start[n], arrays.saved_start[n + 1], arrays.saved
            used[count + n] = step
        for k in range(first, last):
            i: int = needs[k]
            v: int = arrays.root[i]
            if problem.is_pinned[v]:
                continue
            other = used[v] if used[v] >= 0 else made[v]
            if other > step and found < len(rows):
                rows[found, VALUE], rows[found, START], rows[found, END] = v, step, other
                rows[found, HELD] = held if used[v] >= 0 else 0
                sizes[found] = arrays.output_bytes[v]
                found += 1
            used[v] = step
    seconds = np.empty(found, np.float64)
    for k in range(found):
        v = rows[k, 0]
        seconds[k] = arrays.seconds[v - count if v >= count else v]
    return rows[:found], sizes[:found], seconds


@njit
def bar(windows: Small, v: int, start: int, end: int) -> bool:
    """Makes value v absent at the end of steps start to end - 1; whether there was room for the window."""
    row = windows[v]
    size = 0
    for k in range(NUM_WINDOWS):
        s, e = row[k, 0], row[k, 1]
        if s == NONE:
            break
        if e < start or s > end:
            row[size, 0], row[size, 1] = s, e
            size += 1
        else:
            start, end = min(s, start), max(e, end)
    for k in range(size, NUM_WINDOWS):
        row[k, 0] = row[k, 1] = NONE
    if size == NUM_WINDOWS:
        return False
    while size > 0 and row[size - 1, 0] > start:
        row[size, 0], row[size, 1] = row[size - 1, 0], row[size - 1, 1]
        size -= 1
    row[size, 0], row[size, 1] = start, end
    return True


@njit
def unbar(windows: Small, v: int, start: int, end: int) -> bool:
    """Lets value v be held at the end of steps start to end - 1; whether there was room for what remains."""
    old = windows[v].copy()
    row = windows[v]
    size = 0
    row[:] = NONE
    for k in range(NUM_WINDOWS):
        s, e = old[k, 0], old[k, 1]
        if s == NONE:
            break
        for part in range(2):
            first = s if part == 0 else max(s, end)
            last = min(e, start) if part == 0 else e
            if first < last:
                if size == NUM_WINDOWS:
                    return False
                row[size, 0], row[size, 1] = first, last
                size += 1
    return True


@njit
def change_over(windows: Small, row: Small) -> bool:
    """Drops or holds a gap, and its twin's where the move has one; whether there was room for the windows."""
    for at in range(0, 8, 4):
        if row[at] >= 0:
            v, start, end = row[at], row[at + 1], row[at + 2]
            if not (bar(windows, v, start, end) if row[3] else unbar(windows, v, start, end)):
                return False
    return True


@njit
def with_twins(rows: Small, sizes: Ints, seconds: Floats, count: int) -> tuple[Small, Ints, Floats]:
    """The gaps as moves of one value each, and those of output and tape of a node together, which one run makes.

    Rows gain the other value's gap: (value, start, end, held) of the tape, -1 where there is none.
    """
    found = len(rows)
    moves = np.full((2 * found, 8), -1, np.int32)
    bytes, times = np.empty(2 * found, np.int64), np.empty(2 * found, np.float64)
    first = np.full(count, -1, np.int32)  # gaps of an output, chained
    after = np.full(found, -1, np.int32)
    for k in range(found):
        moves[k, :4] = rows[k]
        bytes[k], times[k] = sizes[k], seconds[k]
        if rows[k, 0] < count:
            after[k] = first[rows[k, 0]]
            first[rows[k, 0]] = k
    size = found
    for k in range(found):
        if rows[k, 0] < count:
            continue
        best, other, overlap = -1, first[rows[k, 0] - count], 0
        while other >= 0:
            common = min(rows[k, 2], rows[other, 2]) - max(rows[k, 1], rows[other, 1])
            if (rows[other, HELD] > 0) == (rows[k, HELD] > 0) and common > overlap:
                best, overlap = other, common
            other = after[other]
        if best >= 0:
            moves[size, :4] = rows[best]
            moves[size, 4:] = rows[k]
            bytes[size], times[size] = sizes[best] + sizes[k], seconds[k]
            size += 1
    return moves[:size], bytes[:size], times[:size]


@njit
def try_gaps(problem: Problem, windows: Small, work: Work, rows: Small, limit: int) -> tuple[Ints, Floats, Floats, int]:
    """What changing each gap over, by itself, would give: peak bytes, seconds, `excess_of` above `limit`.

    The last result is the number of actions replayed.
    """
    tried = len(rows)
    peaks = np.empty(tried, np.int64)
    seconds = np.empty(tried, np.float64)
    excess = np.empty(tried, np.float64)
    replayed = 0
    for k in range(tried):
        v = rows[k, 0]
        twin = rows[k, 4] if rows[k, 4] >= 0 else v
        old, old_twin = windows[v].copy(), windows[twin].copy()
        change = change_over(windows, rows[k])
        peaks[k], seconds[k], excess[k] = 1 << 62, np.inf, np.inf
        if change:
            peaks[k], seconds[k], num_actions = replay(problem, windows, work)
            replayed += num_actions
            if num_actions:
                excess[k] = excess_of(work, limit)
        windows[twin] = old_twin
        windows[v] = old
    return peaks, seconds, excess, replayed


@njit
def excess_of(work: Work, limit: int) -> float:
    """Bytes above `limit`, summed over the steps of the schedule just replayed."""
    total = 0.0
    for step in range(len(work.most)):
        if work.most[step] > limit:
            total += work.most[step] - limit
    return total


@njit
def find_room(rows: Small, sizes: Ints, work: Work, limit: int) -> Flags:
    """Which absent gaps have room for their value below `limit` at every step between their ends."""
    found = np.zeros(len(rows), np.bool_)
    for k in range(len(rows)):
        if rows[k, 3]:
            continue
        most = 0
        for step in range(rows[k, 1] + 1, rows[k, 2]):
            most = max(most, work.most[step])
        found[k] = most + sizes[k] <= limit
    return found
