"""A schedule use by use, and what is resident then: what is rearranged is tried from the middle on, and taken back."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...schedules.arrays import BACKWARD, DISCARD, RUN, GraphArrays, graph_arrays
from ...schedules.compiled import Ints, Small, njit
from ...schedules.gradients import gradient_levels
from ...schedules.graph import Graph

BOTH = 2
"""Runs and backwards, each when it stands."""


class Costs(NamedTuple):
    """The bytes of a graph."""

    arrays: GraphArrays
    levels: Ints  # [3, n] of gradients before, and at most during, a backward after which its own goes, or stays
    fixed_bytes: int


class Uses(NamedTuple):
    """A schedule as runs and backwards, the *uses*, and what is discarded, each after the last use of it."""

    codes: Small  # [u] runs and backwards
    first_again: int  # use from which on runs are recomputations in the backward
    barrier: Ints  # [u] of a run the last backward that reads what was there before of its output or tape, or -1
    discards: Small  # [d] their numbers
    last_run: Ints  # [d] last run that makes or reads what is discarded
    last_backward: Ints  # [d] last backward that reads it, or -1
    first: Ints  # [u + 1] of a use, its first in `order`
    order: Ints  # discards, once by their last run and once by their last backward


class State(NamedTuple):
    """What is resident after some uses, and how to go back."""

    values: Ints
    """By node the use that made the storage of the resident output, or -1; whether its tape is resident; the storage
    that the caller holds, -1 before, -2 afterwards. By use how many hold the storage that it made. Last the bytes
    alive, and those of gradients beside."""
    log: Ints  # [·, 2] places in `values` and what stood there
    size: Ints  # [1] of the log
    most: Ints  # [u] the most alive during a use when it was done last


@lru_cache(maxsize=8)
def costs_of(graph: Graph) -> Costs:
    """The bytes of a graph, remembered for the last few."""
    before, released = gradient_levels(graph)
    _, held = gradient_levels(graph, is_released=False)
    levels = np.array([before, released, held], np.int64)
    return Costs(graph_arrays(graph), levels, graph.input_bytes + graph.static_bytes)


@njit
def uses_of(arrays: GraphArrays, actions: Small) -> Uses:
    """The uses of a valid schedule; what is discarded was there for the same ones."""
    count = len(arrays.root)
    codes, barrier = np.empty(len(actions), np.int32), np.full(len(actions), -1)
    discards = np.empty(len(actions), np.int32)
    discarded_run, discarded_backward = np.empty(len(actions), np.int64), np.empty(len(actions), np.int64)
    # Of outputs and, from `count` on, of tapes: last uses of what is there, and backward that read what was before.
    last_run, last_backward, before = np.full(2 * count, -1), np.full(2 * count, -1), np.full(2 * count, -1)
    has_run, is_backward = np.zeros(count, np.bool_), False
    first_again, u, d = 0, 0, 0
    for code in actions:
        n, kind = code >> 2, code & 3
        if kind == RUN:
            if not (has_run[n] and is_backward):
                first_again = u + 1
            has_run[n] = True
            barrier[u] = max(before[n], before[count + n])
            last_run[arrays.read[arrays.read_start[n] : arrays.read_start[n + 1]]] = u
            last_run[n] = last_run[count + n] = u
        elif kind == BACKWARD:
            is_backward = True
            last_backward[arrays.saved[arrays.saved_start[n] : arrays.saved_start[n + 1]]] = u
            last_backward[count + n] = u
        else:
            v = n if kind == DISCARD else count + n
            discards[d], discarded_run[d], discarded_backward[d] = code, last_run[v], last_backward[v]
            before[v] = max(before[v], last_backward[v])
            last_run[v] = last_backward[v] = -1
            d += 1
        if kind <= BACKWARD:
            codes[u] = code
            u += 1
    discarded_run, discarded_backward = discarded_run[:d], discarded_backward[:d]
    # By use: those that have no backward come first, as if by one before all.
    first = np.zeros(u + 3, np.int64)
    for k in range(d):
        first[discarded_run[k] + 2] += 1
        first[discarded_backward[k] + 2] += 1
    first = np.cumsum(first)
    order, at = np.empty(2 * d, np.int64), first.copy()
    for k in range(d):
        for use in (discarded_run[k], discarded_backward[k]):
            order[at[use + 1]] = k
            at[use + 1] += 1
    return Uses(codes[:u], first_again, barrier[:u], discards[:d], discarded_run, discarded_backward, first[1:], order)


@njit
def before_all(costs: Costs, uses: Uses) -> State:
    """Nothing but what is alive throughout."""
    count, length = len(costs.arrays.root), len(uses.codes)
    values = np.zeros(3 * count + length + 2, np.int64)
    values[:count] = values[2 * count : 3 * count] = -1
    values[-2] = costs.fixed_bytes
    log = np.empty((8 * length + 4 * len(uses.discards) + 8, 2), np.int64)
    return State(values, log, np.zeros(1, np.int64), np.zeros(length, np.int64))


@njit
def go_back(state: State, size: int) -> None:
    """Takes back what was changed since the log had that size."""
    for k in range(state.size[0] - 1, size - 1, -1):
        state.values[state.log[k, 0]] = state.log[k, 1]
    state.size[0] = size


@njit
def do(costs: Costs, uses: Uses, state: State, first: int, last: int, kind: int, bound: int, limit: int) -> int:
    """Does uses, and what is discarded after each; the most alive on the way, until that is above a limit.

    Args:
        costs: The bytes.
        uses: The schedule.
        state: What is resident.
        first: Of the uses.
        last: Of them.
        kind: Of those that are done: `RUN`, `BACKWARD`, or `BOTH`.
        bound: Of runs the use up to which backwards are done meanwhile, of backwards that up to which runs are.
        limit: Bytes.
    """
    arrays, values, log = costs.arrays, state.values, state.log
    count, size = len(arrays.root), state.size[0]
    held, holders, alive = 2 * count, 3 * count, len(values) - 2
    most = np.int64(0)
    for u in range(first, last + 1):
        n, is_run = int(uses.codes[u]) >> 2, uses.codes[u] & 3 == RUN
        if kind == BOTH:
            bound = u
        elif is_run != (kind == RUN):
            continue
        if is_run:
            added = arrays.output_bytes[n] + arrays.tape_bytes[n]
            now = values[alive] + values[alive + 1] + added + arrays.workspace_bytes[n]
            if values[n] < 0:
                base = arrays.base[n]
                storage = u if base < 0 else int(values[base])
                is_held = arrays.is_output[n] and values[held + n] == -1
                size = _set(values, log, size, n, storage)
                size = _set(values, log, size, holders + storage, values[holders + storage] + (2 if is_held else 1))
                if base < 0:
                    size = _set(values, log, size, alive, values[alive] + arrays.output_bytes[n])
                if is_held:
                    size = _set(values, log, size, held + n, storage)
            if not values[count + n]:
                size = _set(values, log, size, count + n, 1)
                size = _set(values, log, size, alive, values[alive] + arrays.tape_bytes[n])
        else:
            now = values[alive] + costs.levels[1 if _lets_go(arrays, uses, u, bound) else 2, n]
            size = _set(values, log, size, alive + 1, costs.levels[0, n - 1] if n else 0)
            storage = int(values[held + n])
            if storage >= 0:
                freed = int(arrays.output_bytes[uses.codes[storage] >> 2])
                size = _release(values, log, size, holders + storage, freed)
            size = _set(values, log, size, held + n, -2)
        state.most[u] = now
        most = max(most, now)
        if most > limit:
            break
        for k in range(uses.first[u], uses.first[u + 1]):
            d = int(uses.order[k])
            if _goes(uses, d, is_run, bound):
                m = int(uses.discards[d]) >> 2
                if uses.discards[d] & 3 == DISCARD:
                    storage = int(values[m])
                    freed = int(arrays.output_bytes[uses.codes[storage] >> 2])
                    size = _release(values, log, size, holders + storage, freed)
                    size = _set(values, log, size, m, -1)
                else:
                    size = _set(values, log, size, count + m, 0)
                    size = _set(values, log, size, alive, values[alive] - arrays.tape_bytes[m])
    state.size[0] = size
    return int(most)


@njit
def _release(values: Ints, log: Ints, size: int, holders: int, output_bytes: int) -> int:
    """One holder of a storage goes, of which `holders` is the place of their number; the size of the log after that."""
    alive = len(values) - 2
    size = _set(values, log, size, holders, values[holders] - 1)
    return size if values[holders] else _set(values, log, size, alive, values[alive] - output_bytes)


@njit
def _set(values: Ints, log: Ints, size: int, at: int, value: int) -> int:
    """Sets a value; the size of the log with what stood there."""
    log[size, 0], log[size, 1] = at, values[at]
    values[at] = value
    return size + 1


@njit
def _goes(uses: Uses, d: int, is_run: bool, bound: int) -> bool:
    """Whether what a run, or else a backward, is the last to use goes after it: none of the other kind is to come."""
    return (uses.last_backward[d] if is_run else uses.last_run[d]) <= bound


@njit
def write(uses: Uses, codes: Small, at: int, u: int, bound: int) -> int:
    """Writes a use and what is discarded after it to place `at`; the place after them. `bound` is that of `do`."""
    codes[at] = uses.codes[u]
    at += 1
    for k in range(uses.first[u], uses.first[u + 1]):
        if _goes(uses, uses.order[k], uses.codes[u] & 3 == RUN, bound):
            codes[at] = uses.discards[uses.order[k]]
            at += 1
    return at


@njit
def _lets_go(arrays: GraphArrays, uses: Uses, u: int, bound: int) -> bool:
    """Whether what a backward reads of its own is discarded right after it."""
    n = uses.codes[u] >> 2
    missing = 1 if arrays.tape_bytes[n] > 0 else 0
    for k in range(arrays.saved_start[n], arrays.saved_start[n + 1]):
        missing += 1 if arrays.saved[k] == n else 0
    for k in range(uses.first[u], uses.first[u + 1]):
        d = uses.order[k]
        missing -= 1 if uses.discards[d] >> 2 == n and _goes(uses, d, False, bound) else 0
    return missing == 0
