"""Absence windows to schedules and back; see `window_simulator` for what a window means."""

from __future__ import annotations

import numpy as np

from ...lowering import discard_at_last_use
from ...schedules.arrays import BACKWARD, DISCARD, DISCARD_TAPE, RUN, GraphArrays, encode, graph_arrays
from ...schedules.compiled import Flags, Small, njit
from ...schedules.graph import Graph
from ...schedules.schedule import Schedule
from ...schedules.uses import last_reads
from .window_simulator import NONE, NUM_WINDOWS, Problem, Work, no_windows, replay


def codes_of(problem: Problem, windows: Small, work: Work) -> Small:
    """The schedule that `windows` describe, as numbers: every discard stands right after the last use."""
    _, _, num_actions = replay(problem, windows, work)
    assert num_actions, "a schedule that was accepted is not too long"
    codes = _with_discards(problem.arrays, work.action[:num_actions], work.made[:num_actions])
    return discard_at_last_use(problem.arrays, codes, np.empty(0, np.int64))


@njit
def _with_discards(arrays: GraphArrays, actions: Small, made: Flags) -> Small:
    """The actions of a replay with every discard, at the latest place where it may stand: liveness moves it up."""
    count = len(arrays.root)
    codes, at = np.empty(2 * len(actions) + 2 * count, np.int32), 0
    has_run = np.zeros(count, np.bool_)
    for k in range(len(actions)):
        a = actions[k]
        if a < 0:
            codes[at] = 4 * (-1 - a) + BACKWARD
        else:
            if made[k] and has_run[a]:
                codes[at] = 4 * a + DISCARD
                at += 1
            has_run[a] = True
            codes[at] = 4 * a + RUN
        at += 1
    for kind in (DISCARD, DISCARD_TAPE):
        for n in range(count):
            if has_run[n] and (kind == DISCARD or arrays.tape_bytes[n] > 0):
                codes[at] = 4 * n + kind
                at += 1
    return codes[:at]


def windows_between(graph: Graph, problem: Problem, outputs: Flags, tapes: Flags, end: int) -> Small:
    """Windows from the last use in the forward to step `end` for all that is not to be kept.

    Args:
        graph: The operations.
        problem: The graph as arrays.
        outputs: [n] whether an output is kept.
        tapes: [n] whether a tape is kept.
        end: The step at whose end a value may be held again.
    """
    windows, count = no_windows(problem), len(graph.nodes)
    for v, last in enumerate(last_reads(graph)):
        if graph.roots[v] == v and not problem.is_pinned[v] and not outputs[v]:
            windows[v, 0] = last, end
        if graph.nodes[v].tape_bytes and not tapes[v]:
            windows[count + v, 0] = v, end
    return windows


def windows_of(graph: Graph, problem: Problem, schedule: Schedule) -> Small:
    """Windows that hold at the end of each step what `schedule` holds there, as far as `NUM_WINDOWS` allow.

    Recomputations move to right before the step that needs them. Where a value is absent more often than it may
    have windows, the shortest absences are given up, so that it is held longer.
    """
    arrays = graph_arrays(graph)
    is_free = np.concatenate([(arrays.base < 0) & ~problem.is_pinned, arrays.tape_bytes > 0])
    windows = no_windows(problem)
    _fill(arrays, encode(graph, schedule), is_free, windows)
    return windows


@njit
def _fill(arrays: GraphArrays, codes: Small, is_free: Flags, windows: Small) -> None:
    """Writes the longest absences of each value that may have windows."""
    value, start, end = _absences(arrays, codes)
    steps = len(is_free)
    lengths = np.where(end == NONE, steps, end) - start
    taken = np.zeros(steps, np.int64)
    for k in np.argsort(-lengths, kind="mergesort"):
        v = value[k]
        if is_free[v] and taken[v] < NUM_WINDOWS:
            windows[v, taken[v]] = start[k], end[k]
            taken[v] += 1
    for v in range(steps):
        if taken[v] > 1:
            windows[v] = windows[v][np.argsort(windows[v, :, 0], kind="mergesort")]


@njit
def _absences(arrays: GraphArrays, codes: Small) -> tuple[Small, Small, Small]:
    """Values, and the steps at whose end they are absent first and present again; of views only their storage."""
    count = len(arrays.root)
    value = np.empty(len(codes) + 2 * count, np.int32)
    start, end = np.empty_like(value), np.empty_like(value)
    found = 0
    resident, has_run = np.zeros(2 * count, np.bool_), np.zeros(count, np.bool_)
    holders = np.zeros(2 * count, np.int32)  # resident outputs in the storage of a root; whether a tape is
    since = np.full(2 * count, -1, np.int32)
    changed = np.empty(2 * len(codes), np.int32)
    num_changed = 0
    step, is_settled = -1, True
    for at in range(len(codes)):
        n, kind = codes[at] >> 2, codes[at] & 3
        # The first run after a step's own action belongs to the next step.
        if not is_settled and kind <= BACKWARD:
            for k in range(num_changed):
                v = changed[k]
                if holders[v] > 0 and since[v] >= 0:
                    value[found], start[found], end[found] = v, since[v], step
                    found += 1
                    since[v] = -1
                elif holders[v] == 0 and since[v] < 0:
                    since[v] = step
            num_changed = 0
            is_settled = True
        if kind == BACKWARD or (kind == RUN and not has_run[n]):
            step += 1
            is_settled = False
            has_run[n] = True
        if kind == BACKWARD:
            continue
        for v in (n, count + n):
            if (kind == DISCARD and v != n) or (kind == DISCARD_TAPE and v == n) or resident[v] == (kind == RUN):
                continue
            home = arrays.root[n] if v == n else v
            resident[v] = kind == RUN
            holders[home] += 1 if kind == RUN else -1
            changed[num_changed] = home
            num_changed += 1
    for v in range(2 * count):
        if since[v] >= 0:
            value[found], start[found], end[found] = v, since[v], NONE
            found += 1
    return value[:found], start[:found], end[:found]
