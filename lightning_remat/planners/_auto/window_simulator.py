"""A compiled simulator of *absence windows*: tens of microseconds where `simulate` takes milliseconds.

The planner `auto` tries tens of thousands of schedules. Each is described by when a value may *not* be held: a
window (a, b) of value v drops it at the end of steps a to b - 1. Step t < n is the first run of node t, step
2n - 1 - m the backward of node m. What a step finds missing is recomputed right before it, in index order, from
what is held; a recomputed value is held on unless a window forbids it. So no window at all is plain autograd, a window
over the turning point is a recomputation, a longer one a repeated recomputation, one within the forward a dropped
long skip. Every memory-persistent schedule and many others are a choice of windows.

`simulate` stays the judge: `tests/planners/test_fast_simulator.py` holds the two equal to the byte.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...schedules.arrays import GraphArrays, graph_arrays
from ...schedules.compiled import Flags, Ints, Small, njit
from ...schedules.gradients import gradient_levels
from ...schedules.graph import Graph

NUM_WINDOWS = 8
"""Most windows of one value."""

NONE = 1 << 30
"""Start and end of a window that is not there."""

BEFORE, HIGHEST = range(2)


class Problem(NamedTuple):
    """A graph as arrays. Value v < n is the output of root v with its views, value n + m the tape of node m."""

    arrays: GraphArrays
    is_pinned: Flags  # [n] of a root, whether the caller holds it until a backward
    levels: Ints  # [n, 2] gradient bytes before and at most during the backward of a node
    fixed_bytes: int
    fixed_seconds: float  # one forward and one backward of every node


class Work(NamedTuple):
    """Memory of a replay, reused from one to the next, and its results."""

    action: Small  # node of a run, or -1 - node of a backward
    step: Small  # step of each action
    made: Flags  # whether a run found the output absent
    freed: Ints  # bytes that end with an action
    most: Ints  # [2n] most alive during a step
    resident: Flags  # [2n] by node: output, tape
    barred: Small  # [2n] windows open
    marked: Small  # [n] step of the last closure that holds the node
    list: Small  # [n] closure under construction
    stack: Small
    starts: Small  # [2n] first window of a step, in next
    ends: Small
    next_start: Small  # [2n * NUM_WINDOWS]
    next_end: Small
    alive: Small  # [2n] by value: step of the next use, or -1


def pack(graph: Graph) -> Problem:
    """The graph as arrays for the compiled functions."""
    before, highest = gradient_levels(graph)
    is_pinned = np.zeros(len(graph.nodes), np.bool_)
    is_pinned[[graph.roots[n] for n in graph.outputs]] = True
    return Problem(
        graph_arrays(graph),
        is_pinned,
        np.array([before, highest], np.int64).T.copy(),
        graph.input_bytes + graph.static_bytes,
        float(sum(node.forward_seconds + node.backward_seconds for node in graph.nodes)),
    )


def work_for(problem: Problem) -> Work:
    """Memory for replays of `problem`."""
    count = len(problem.is_pinned)
    longest = 64 * count + 20_000  # a longer schedule is refused: it recomputes everything 60 times

    def small(size: int) -> Small:
        return np.zeros(size, np.int32)

    return Work(
        small(longest), small(longest), np.zeros(longest, np.uint8), np.zeros(longest, np.int64),
        np.zeros(2 * count, np.int64), np.zeros(2 * count, np.uint8), small(2 * count), small(count), small(count),
        small(count), small(2 * count), small(2 * count),
        small(2 * count * NUM_WINDOWS), small(2 * count * NUM_WINDOWS), small(2 * count),
    )  # fmt: skip


def no_windows(problem: Problem) -> Small:
    """[2n, NUM_WINDOWS, 2] windows, none of them there: plain autograd."""
    return np.full((2 * len(problem.is_pinned), NUM_WINDOWS, 2), NONE, np.int32)


@njit
def replay(problem: Problem, windows: Small, work: Work) -> tuple[int, float, int]:
    """Peak bytes, seconds and number of actions (0: too long) of the schedule that `windows` describe.

    Fills `work.action`, `step` and `made` with runs and backwards in order, and `work.most` with the timeline.
    """
    num_actions, seconds = _write(problem, windows, work)
    if num_actions == 0:
        return 1 << 62, np.inf, 0
    _end_lives(problem, work, num_actions)
    return _weigh(problem, work, num_actions), seconds, num_actions


@njit
def _write(problem: Problem, windows: Small, work: Work) -> tuple[int, float]:
    """Writes the runs and backwards in order; their number and seconds."""
    arrays, count = problem.arrays, len(problem.is_pinned)
    resident, barred, marked = work.resident, work.barred, work.marked
    resident[:] = 0
    barred[:] = 0
    marked[:] = -1
    _sort_windows(windows, work)
    seconds: float = problem.fixed_seconds
    longest = len(work.action)
    at = 0
    for step in range(2 * count):
        # What `uses.mark_missing` finds: it may lie far apart, and a stack does not pass by all that lies between.
        found = 0
        size = 0
        if step < count:
            n = step
            first, last, needs = arrays.read_start[n], arrays.read_start[n + 1], arrays.read
        else:
            n = 2 * count - 1 - step
            first, last, needs = arrays.saved_start[n], arrays.saved_start[n + 1], arrays.saved
            if arrays.tape_bytes[n] > 0 and not resident[count + n]:
                marked[n] = step
                work.stack[size] = n
                size += 1
        for k in range(first, last):
            if not resident[needs[k]] and marked[needs[k]] != step:
                marked[needs[k]] = step
                work.stack[size] = needs[k]
                size += 1
        while size > 0:
            size -= 1
            m = work.stack[size]
            work.list[found] = m
            found += 1
            for k in range(arrays.read_start[m], arrays.read_start[m + 1]):
                i = arrays.read[k]
                if not resident[i] and marked[i] != step:
                    marked[i] = step
                    work.stack[size] = i
                    size += 1
        if at + found + 2 > longest:
            return 0, np.inf
        if found > 1:
            work.list[:found].sort()
        if step < count:
            work.list[found] = n
            found += 1
        for k in range(found):
            m: int = work.list[k]
            work.action[at], work.step[at], work.made[at] = m, step, not resident[m]
            at += 1
            resident[m] = resident[count + m] = 1
            if m < step:  # else it is the first run
                seconds += arrays.seconds[m]
        if step >= count:
            work.action[at], work.step[at] = -1 - n, step
            at += 1
        w: int = work.ends[step]
        while w >= 0:
            barred[w // NUM_WINDOWS] -= 1
            w = work.next_end[w]
        w = work.starts[step]
        while w >= 0:
            v = w // NUM_WINDOWS
            barred[v] += 1
            _drop(arrays, resident, v)
            w = work.next_start[w]
        for k in range(found):
            m = work.list[k]
            if barred[arrays.root[m]] > 0:
                resident[m] = 0
            if barred[count + m] > 0:
                resident[count + m] = 0
    return at, seconds


@njit
def _sort_windows(windows: Small, work: Work) -> None:
    """Chains the windows that start, and those that end, with each step."""
    work.starts[:] = -1
    work.ends[:] = -1
    steps = len(work.starts)
    for v in range(len(windows)):
        for k in range(NUM_WINDOWS):
            start, end = windows[v, k, 0], windows[v, k, 1]
            if start >= steps:
                break
            w = v * NUM_WINDOWS + k
            work.next_start[w] = work.starts[start]
            work.starts[start] = w
            if end < steps:
                work.next_end[w] = work.ends[end]
                work.ends[end] = w


@njit
def _drop(arrays: GraphArrays, resident: Flags, v: int) -> None:
    if v >= len(arrays.root):
        resident[v] = 0
        return
    for k in range(arrays.member_start[v], arrays.member_start[v + 1]):
        resident[arrays.member[k]] = 0


@njit
def _end_lives(problem: Problem, work: Work, num_actions: int) -> None:
    """Liveness: `work.freed` says what ends with each action, found by reading the schedule from its end."""
    arrays, count = problem.arrays, len(problem.is_pinned)
    alive, freed = work.alive, work.freed
    alive[:] = 0
    for at in range(num_actions - 1, -1, -1):
        a = work.action[at]
        ended = 0
        if a >= 0:
            root = arrays.root[a]
            if root != a or (arrays.is_shared[a] and not work.made[at]):
                if root != a and not alive[root]:  # a view that nobody reads: its storage ends here
                    alive[root] = 1
                    ended += arrays.output_bytes[root]
            elif alive[a]:
                alive[a] = 0
            else:
                ended += arrays.output_bytes[a]
            if alive[count + a]:
                alive[count + a] = 0
            else:
                ended += arrays.tape_bytes[a]
            for k in range(arrays.read_start[a], arrays.read_start[a + 1]):
                root = arrays.root[arrays.read[k]]
                if not alive[root]:
                    alive[root] = 1
                    ended += arrays.output_bytes[root]
        else:
            n = -1 - a
            for k in range(arrays.saved_start[n], arrays.saved_start[n + 1]):
                root = arrays.root[arrays.saved[k]]
                if not alive[root]:
                    alive[root] = 1
                    ended += arrays.output_bytes[root]
            if not alive[count + n]:
                alive[count + n] = 1
                ended += arrays.tape_bytes[n]
            root = arrays.root[n]
            if arrays.is_output[n] and not alive[root]:
                alive[root] = 1
                ended += arrays.output_bytes[root]
        freed[at] = ended


@njit
def _weigh(problem: Problem, work: Work, num_actions: int) -> int:
    """The peak; fills `work.most`."""
    arrays, count = problem.arrays, len(problem.is_pinned)
    levels, most = problem.levels, work.most
    most[:] = 0
    held = problem.fixed_bytes
    peak = 0
    for at in range(num_actions):
        a = work.action[at]
        step = work.step[at]
        if a >= 0:
            level = levels[2 * count - 1 - step, BEFORE] if step >= count else 0
            now = held + level + arrays.output_bytes[a] + arrays.tape_bytes[a] + arrays.workspace_bytes[a]
            held += arrays.tape_bytes[a]
            if work.made[at] or not arrays.is_shared[a]:
                held += arrays.output_bytes[a]
        else:
            now = held + levels[-1 - a, HIGHEST]
        held -= work.freed[at]
        if now > most[step]:
            most[step] = now
            if now > peak:
                peak = now
    return int(peak)
