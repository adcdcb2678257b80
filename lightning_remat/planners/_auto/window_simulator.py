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

from ...schedules.arrays import graph_arrays, rows
from ...schedules.compiled import Flags, Floats, Ints, Small, njit
from ...schedules.gradients import gradient_levels
from ...schedules.graph import Graph
from ...schedules.uses import members

NUM_WINDOWS = 8
"""Most windows of one value."""

NONE = 1 << 30
"""Start and end of a window that is not there."""

ROOT, OUTPUT, TAPE, WORKSPACE, IS_SHARED, PINNED = range(6)
BEFORE, HIGHEST = range(2)


class Problem(NamedTuple):
    """A graph as arrays. Value v < n is the output of root v with its views, value n + m the tape of node m."""

    nodes: Ints  # [n, 6]: root, output bytes, tape bytes, forward workspace, whether others live in it, whether pinned
    seconds: Floats  # [n] of a forward run
    read_start: Small  # [n + 1] into read
    read: Small
    saved_start: Small
    saved: Small
    member_start: Small  # members of a root: itself and its views
    member: Small
    held_start: Small  # outputs of the graph that live until this backward, as roots
    held: Small
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
    count = len(graph.nodes)
    roots, arrays = graph.roots, graph_arrays(graph)
    views = members(graph)
    held = {roots[n] for n in graph.outputs}
    nodes = np.zeros((count, 6), np.int64)
    for n, node in enumerate(graph.nodes):
        is_shared = len(views[roots[n]]) > 1 or roots[n] in held
        sizes = node.output_bytes, node.tape_bytes, node.forward_workspace_bytes
        nodes[n] = (roots[n], *sizes, is_shared, roots[n] in held)
    before, highest = gradient_levels(graph)
    until = [[roots[n]] if n in graph.outputs else [] for n in range(count)]
    return Problem(
        nodes,
        np.array([node.forward_seconds for node in graph.nodes], np.float64),
        *(arrays.read_start, arrays.read, arrays.saved_start, arrays.saved),
        *rows(views),
        *rows(until),
        np.array([before, highest], np.int64).T.copy(),
        graph.input_bytes + graph.static_bytes,
        float(sum(node.forward_seconds + node.backward_seconds for node in graph.nodes)),
    )


def work_for(problem: Problem) -> Work:
    """Memory for replays of `problem`."""
    count = len(problem.seconds)
    longest = 64 * count + 20_000  # a longer schedule is refused: it recomputes everything 60 times

    def small(size: int) -> Small:
        return np.zeros(size, np.int32)

    return Work(
        small(longest), small(longest), np.zeros(longest, np.uint8), np.zeros(longest, np.int64),
        np.zeros(2 * count, np.int64), np.zeros(2 * count, np.uint8), small(2 * count), small(count), small(count),
        small(4 * len(problem.read) + 4 * count + 16), small(2 * count), small(2 * count),
        small(2 * count * NUM_WINDOWS), small(2 * count * NUM_WINDOWS), small(2 * count),
    )  # fmt: skip


def no_windows(problem: Problem) -> Small:
    """[2n, NUM_WINDOWS, 2] windows, none of them there: plain autograd."""
    return np.full((2 * len(problem.seconds), NUM_WINDOWS, 2), NONE, np.int32)


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
    count = len(problem.seconds)
    resident, barred, marked = work.resident, work.barred, work.marked
    resident[:] = 0
    barred[:] = 0
    marked[:] = -1
    _sort_windows(windows, work)
    seconds: float = problem.fixed_seconds
    longest = len(work.action)
    at = 0
    for step in range(2 * count):
        if step < count:
            n = step
            first, last, needs = problem.read_start[n], problem.read_start[n + 1], problem.read
        else:
            n = 2 * count - 1 - step
            first, last, needs = problem.saved_start[n], problem.saved_start[n + 1], problem.saved
        found = 0
        size = 0
        for k in range(first, last):
            if not resident[needs[k]] and marked[needs[k]] != step:
                marked[needs[k]] = step
                work.stack[size] = needs[k]
                size += 1
        if step >= count and problem.nodes[n, TAPE] > 0 and not resident[count + n] and marked[n] != step:
            marked[n] = step
            work.stack[size] = n
            size += 1
        while size > 0:
            size -= 1
            m = work.stack[size]
            work.list[found] = m
            found += 1
            for k in range(problem.read_start[m], problem.read_start[m + 1]):
                i = problem.read[k]
                if not resident[i] and marked[i] != step:
                    marked[i] = step
                    work.stack[size] = i
                    size += 1
        if at + found + 2 > longest:
            return 0, np.inf
        if found > 1:
            work.list[:found].sort()
        for k in range(found):
            m: int = work.list[k]
            work.action[at] = m
            work.step[at] = step
            work.made[at] = not resident[m]
            at += 1
            seconds += problem.seconds[m]
            resident[m] = 1
            resident[count + m] = 1
        work.step[at] = step
        if step < count:
            work.action[at] = n
            work.made[at] = 1
            resident[n] = 1
            resident[count + n] = 1
            work.list[found] = n
            found += 1
        else:
            work.action[at] = -1 - n
        at += 1
        w: int = work.ends[step]
        while w >= 0:
            barred[w // NUM_WINDOWS] -= 1
            w = work.next_end[w]
        w = work.starts[step]
        while w >= 0:
            v = w // NUM_WINDOWS
            barred[v] += 1
            _drop(problem, resident, v)
            w = work.next_start[w]
        for k in range(found):
            m = work.list[k]
            if barred[problem.nodes[m, ROOT]] > 0:
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
def _drop(problem: Problem, resident: Flags, v: int) -> None:
    count = len(problem.seconds)
    if v >= count:
        resident[v] = 0
        return
    for k in range(problem.member_start[v], problem.member_start[v + 1]):
        resident[problem.member[k]] = 0


@njit
def _end_lives(problem: Problem, work: Work, num_actions: int) -> None:
    """Liveness: `work.freed` says what ends with each action, found by reading the schedule from its end."""
    count = len(problem.seconds)
    nodes, alive, freed = problem.nodes, work.alive, work.freed
    alive[:] = 0
    for at in range(num_actions - 1, -1, -1):
        a = work.action[at]
        ended = 0
        if a >= 0:
            root = nodes[a, ROOT]
            if root != a or (nodes[a, IS_SHARED] and not work.made[at]):
                if root != a and not alive[root]:  # a view that nobody reads: its storage ends here
                    alive[root] = 1
                    ended += nodes[root, OUTPUT]
            elif alive[a]:
                alive[a] = 0
            else:
                ended += nodes[a, OUTPUT]
            if alive[count + a]:
                alive[count + a] = 0
            else:
                ended += nodes[a, TAPE]
            for k in range(problem.read_start[a], problem.read_start[a + 1]):
                root = nodes[problem.read[k], ROOT]
                if not alive[root]:
                    alive[root] = 1
                    ended += nodes[root, OUTPUT]
        else:
            n = -1 - a
            for k in range(problem.saved_start[n], problem.saved_start[n + 1]):
                root = nodes[problem.saved[k], ROOT]
                if not alive[root]:
                    alive[root] = 1
                    ended += nodes[root, OUTPUT]
            if not alive[count + n]:
                alive[count + n] = 1
                ended += nodes[n, TAPE]
            for k in range(problem.held_start[n], problem.held_start[n + 1]):
                root = problem.held[k]
                if not alive[root]:
                    alive[root] = 1
                    ended += nodes[root, OUTPUT]
        freed[at] = ended


@njit
def _weigh(problem: Problem, work: Work, num_actions: int) -> int:
    """The peak; fills `work.most`."""
    count = len(problem.seconds)
    nodes, levels, most = problem.nodes, problem.levels, work.most
    most[:] = 0
    held = problem.fixed_bytes
    peak = 0
    for at in range(num_actions):
        a = work.action[at]
        step = work.step[at]
        if a >= 0:
            level = levels[2 * count - 1 - step, BEFORE] if step >= count else 0
            now = held + level + nodes[a, OUTPUT] + nodes[a, TAPE] + nodes[a, WORKSPACE]
            held += nodes[a, TAPE]
            if work.made[at] or not nodes[a, IS_SHARED]:
                held += nodes[a, OUTPUT]
        else:
            now = held + levels[-1 - a, HIGHEST]
        held -= work.freed[at]
        if now > most[step]:
            most[step] = now
            if now > peak:
                peak = now
    return peak
