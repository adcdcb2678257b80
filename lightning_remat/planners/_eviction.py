"""A step under a memory budget that evicts what is cheapest to lose: dynamic tensor rematerialization, replayed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..schedules.arrays import BACKWARD, DISCARD, DISCARD_TAPE, RUN, GraphArrays, graph_arrays, rows
from ..schedules.compiled import Flags, Floats, Ints, Small, njit
from ..schedules.gradients import gradient_levels
from ..schedules.graph import Graph
from ..schedules.uses import readers


class Step(NamedTuple):
    """A graph as arrays. Lists of nodes are one array `x` with `x_start[n]:x_start[n + 1]` for node n."""

    arrays: GraphArrays
    backward_seconds: Floats
    users_start: Small  # of a node: what reads it
    users: Small
    before_bytes: Ints  # all that is alive besides outputs and tapes before the backward of a node
    highest_bytes: Ints  # and at most during it
    fixed_bytes: int


def pack_step(graph: Graph) -> Step:
    """The graph as arrays for `evict`."""
    fixed = graph.input_bytes + graph.static_bytes
    before, highest = gradient_levels(graph)
    return Step(
        graph_arrays(graph),
        np.array([n.backward_seconds for n in graph.nodes]),
        *rows(readers(graph)),
        np.array(before, np.int64) + fixed,
        np.array(highest, np.int64) + fixed,
        fixed,
    )


def evict(step: Step, budget_bytes: int, most_runs: int) -> Small | None:
    """The actions of dynamic tensor rematerialization within the budget, as numbers, or None where it fails.

    An operation first brings back the inputs that it misses, each in turn by the same rule, and holds them meanwhile.
    Where memory is short, the resident value with the least cost / (size · staleness) goes until it suffices: cost
    is the time to run it and its evicted neighborhood again (evicted ancestors that it would need and evicted
    descendants that would need it), staleness the time since its last use. What nothing refers to any more goes at
    once.

    Args:
        step: The graph.
        budget_bytes: Memory that no action may exceed.
        most_runs: Runs after which the attempt counts as failed: eviction may thrash.

    Reference: Kirisame et al. 2021, section 2 and Algorithm 1 (h_DTR with e*, eager eviction).
    """
    count = len(step.arrays.root)
    state = _State(
        output=np.zeros(count, np.bool_),
        tape=np.zeros(count, np.bool_),
        locks=np.zeros(count, np.int64),
        references=np.bincount(
            np.concatenate([step.arrays.root[step.arrays.read], step.arrays.root[step.arrays.saved]]), minlength=count
        ).astype(np.int64),
        used=np.zeros((count, 2)),
        mark=np.zeros(count, np.int64),
        found=np.zeros(count + 1, np.int64),
        stack=np.zeros(count + 1, np.int64),
        place=np.zeros(count + 1, np.int64),
        # Every drop follows a run that made the value; a run makes one output and one tape.
        actions=np.zeros(3 * most_runs + count, np.int32),
        number=np.array([0, 0, 0, 0, -1, 0, count]),
        clock=np.zeros(1),
    )
    if not _evict(step, state, budget_bytes, most_runs):
        return None
    return state.actions[: state.number[_ACTIONS]]


class _State(NamedTuple):
    """What changes as the step is executed; numbers live in `number`, so that functions may change them."""

    output: Flags  # whether the output of a node is resident
    tape: Flags
    locks: Ints  # of a root's storage: operations under way that read it, and the caller
    references: Ints  # of a root: first runs and backwards to come that read it or a view of it
    used: Floats  # [n, 2] time of the last use of output and tape
    mark: Ints  # of a node: the search that met it last
    found: Ints  # stack of that search
    stack: Ints  # operations under way, each for the one before
    place: Ints  # how many of its inputs an operation under way has locked
    actions: Small  # as `schedules.arrays` numbers them
    number: Ints  # _ALIVE bytes, _ACTIONS, _RUNS, _SEARCH, _TAPE that is locked, _RAN: nodes before this have run,
    # _LEFT: nodes from here on are done with
    clock: Floats


_ALIVE, _ACTIONS, _RUNS, _SEARCH, _TAPE, _RAN, _LEFT = range(7)


@njit
def _record(state: _State, kind: int, node: int) -> None:
    state.actions[state.number[_ACTIONS]] = 4 * node + kind
    state.number[_ACTIONS] += 1


@njit
def _drop_output(step: Step, state: _State, root: int) -> None:
    """The storage goes, and with it all views of it."""
    state.number[_ALIVE] -= step.arrays.output_bytes[root]
    for p in range(step.arrays.member_start[root], step.arrays.member_start[root + 1]):
        if state.output[step.arrays.member[p]]:
            state.output[step.arrays.member[p]] = False
            _record(state, DISCARD, step.arrays.member[p])


@njit
def _drop_tape(step: Step, state: _State, node: int) -> None:
    state.number[_ALIVE] -= step.arrays.tape_bytes[node]
    state.tape[node] = False
    _record(state, DISCARD_TAPE, node)


@njit
def _drop_unreferenced(step: Step, state: _State, root: int) -> None:
    if state.references[root] == 0 and state.locks[root] == 0 and state.output[root]:
        _drop_output(step, state, root)


@njit
def _neighborhood_seconds(step: Step, state: _State, node: int) -> float:
    """Time to run a node and its evicted neighborhood: ancestors missing, and descendants missing that have run."""
    state.number[_SEARCH] += 1
    search = state.number[_SEARCH]
    cost = step.arrays.seconds[node]
    state.mark[node] = search
    for downward in range(2):
        near = step.users if downward else step.arrays.read
        near_start = step.users_start if downward else step.arrays.read_start
        size = 1
        state.found[0] = node
        while size > 0:
            size -= 1
            k = state.found[size]
            for p in range(near_start[k], near_start[k + 1]):
                i = near[p]
                has_run = i < state.number[_RAN] and i < state.number[_LEFT]
                if has_run and not state.output[i] and state.mark[i] != search:
                    state.mark[i] = search
                    cost += step.arrays.seconds[i]
                    state.found[size] = i
                    size += 1
    return cost


@njit
def _weight(step: Step, state: _State, v: int, is_tape: bool, busy: int) -> float:
    """Size times staleness of an output or tape, or 0 where there is nothing to evict."""
    if is_tape:
        is_evictable = state.tape[v] and v != state.number[_TAPE] and v != busy
        size = step.arrays.tape_bytes[v]
    else:
        is_evictable = state.output[v] and step.arrays.root[v] == v and state.locks[v] == 0
        size = step.arrays.output_bytes[v]
    return size * (state.clock[0] - state.used[v, int(is_tape)] + _INSTANT) if is_evictable else 0.0


@njit
def _make_room(step: Step, state: _State, need_bytes: int, busy: int) -> bool:
    """Evicts until no more than `need_bytes` are alive; False where nothing is left to evict.

    The tape of `busy`, which is about to run, stays. A value's own seconds bound its cost from below, which spares
    the search of most neighborhoods.
    """
    while state.number[_ALIVE] > need_bytes:
        first, least = -1, np.inf
        for v in range(len(step.arrays.root)):
            for is_tape in (False, True):
                weight = _weight(step, state, v, is_tape, busy)
                if weight > 0 and step.arrays.seconds[v] / weight < least:
                    first, least = 2 * v + int(is_tape), step.arrays.seconds[v] / weight
        if first < 0:
            return False
        weight = _weight(step, state, first >> 1, first & 1 == 1, busy)
        enough = _neighborhood_seconds(step, state, first >> 1) / weight
        best, least = -1, np.inf
        for v in range(len(step.arrays.root)):
            for is_tape in (False, True):
                weight = _weight(step, state, v, is_tape, busy)
                if weight > 0 and step.arrays.seconds[v] / weight <= enough:
                    score = _neighborhood_seconds(step, state, v) / weight
                    if score < least:
                        best, least = 2 * v + int(is_tape), score
        if best & 1:
            _drop_tape(step, state, best >> 1)
        else:
            _drop_output(step, state, best >> 1)
    return True


_INSTANT = 1e-12  # seconds, so that what was used just now has a score


@njit
def _bring(step: Step, state: _State, goal: int, room_bytes: int, most_runs: int, is_first: bool) -> bool:
    """Runs `goal` once all its inputs are there, by the same rule; False where memory or runs do not suffice."""
    state.stack[0], state.place[0] = goal, 0
    depth = 1
    while depth > 0:
        k: int = state.stack[depth - 1]
        start, stop = step.arrays.read_start[k], step.arrays.read_start[k + 1]
        if start + state.place[depth - 1] < stop:
            i = step.arrays.read[start + state.place[depth - 1]]
            if state.output[i]:
                state.locks[step.arrays.root[i]] += 1
                state.place[depth - 1] += 1
            else:
                state.stack[depth], state.place[depth] = i, 0
                depth += 1
            continue
        need = step.arrays.output_bytes[k] + step.arrays.tape_bytes[k] + step.arrays.workspace_bytes[k]
        state.locks[step.arrays.root[k]] += 1
        if state.number[_RUNS] == most_runs or not _make_room(step, state, room_bytes - need, k):
            return False
        state.number[_RUNS] += 1
        state.clock[0] += step.arrays.seconds[k]
        _record(state, RUN, k)
        if not state.output[k]:
            state.output[k] = True
            state.number[_ALIVE] += step.arrays.output_bytes[k]
        if not state.tape[k] and step.arrays.tape_bytes[k] > 0:
            state.tape[k] = True
            state.number[_ALIVE] += step.arrays.tape_bytes[k]
        state.used[step.arrays.root[k], 0] = state.used[k, 1] = state.clock[0]
        depth -= 1
        if depth > 0:  # the lock on the output passes to the operation that asked for it
            state.place[depth - 1] += 1
        elif is_first and not step.arrays.is_output[k]:
            state.locks[step.arrays.root[k]] -= 1  # else it passes to the caller, or to the backward that asked
        for p in range(start, stop):
            read: int = step.arrays.read[p]
            root: int = step.arrays.root[read]
            state.locks[root] -= 1
            state.used[root, 0] = state.clock[0]
            if is_first and depth == 0:
                state.references[root] -= 1
            _drop_unreferenced(step, state, root)
    _drop_unreferenced(step, state, step.arrays.root[goal])
    return True


@njit
def _evict(step: Step, state: _State, budget_bytes: int, most_runs: int) -> bool:
    count = len(step.arrays.root)
    for m in range(count):
        state.number[_RAN], state.number[_LEFT] = m, count
        if not _bring(step, state, m, budget_bytes - step.fixed_bytes, most_runs, True):
            return False
    state.number[_RAN] = count
    for m in range(count - 1, -1, -1):
        state.number[_LEFT] = m + 1
        room = budget_bytes - step.before_bytes[m]
        start, stop = step.arrays.saved_start[m], step.arrays.saved_start[m + 1]
        if step.arrays.tape_bytes[m] > 0:
            if not state.tape[m]:
                if not _bring(step, state, m, room, most_runs, False):
                    return False
                state.locks[step.arrays.root[m]] -= 1
                _drop_unreferenced(step, state, step.arrays.root[m])
            state.number[_TAPE] = m
        for p in range(start, stop):
            if state.output[step.arrays.saved[p]]:
                state.locks[step.arrays.root[step.arrays.saved[p]]] += 1
            elif not _bring(step, state, step.arrays.saved[p], room, most_runs, False):
                return False
        if not _make_room(step, state, budget_bytes - step.highest_bytes[m], m):
            return False
        _record(state, BACKWARD, m)
        state.clock[0] += step.backward_seconds[m]
        if step.arrays.tape_bytes[m] > 0:
            _drop_tape(step, state, m)
        if step.arrays.is_output[m]:
            state.locks[step.arrays.root[m]] -= 1
        for p in range(start, stop):
            saved: int = step.arrays.saved[p]
            root: int = step.arrays.root[saved]
            state.locks[root] -= 1
            state.references[root] -= 1
            state.used[root, 0] = state.clock[0]
        for p in range(start, stop):
            saved = step.arrays.saved[p]
            _drop_unreferenced(step, state, step.arrays.root[saved])
        _drop_unreferenced(step, state, step.arrays.root[m])
    return True
