"""The dynamic program over lower sets, compiled: steps between lower sets, memory limits, bounds, Pareto fronts.

Rows are lower sets by ascending size, row 0 is ∅ and the last row V. A state is a triplet (L, t, m) of kusumoto2019
section 4.2: the lower set, the overhead so far and the memory cached so far. Memory is in whole units held as floats.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...schedules.compiled import Floats, Ints, Small, njit

Words = NDArray[np.uint64]  # [sets, words] the members of each set as bits


class Family(NamedTuple):
    """Lower sets and what the steps between them ask.

    Attributes:
        words: The lower sets.
        boundary: Their boundaries ∂(L), the members that a node outside reads.
        boundary_nodes: The same as numbers of nodes, row after row.
        boundary_start: Where the boundary of each row begins.
        total: T(L) of each row.
        times: T of each node.
        memories: M of each node.
        depends: L_v of each node: what it depends on, itself included.
        leaking: The members of L_v with a reader outside of L_v.
        is_complete: Whether the family holds all lower sets.
    """

    words: Words
    boundary: Words
    boundary_nodes: Small
    boundary_start: Ints
    total: Floats
    times: Floats
    memories: Floats
    depends: Words
    leaking: Words
    is_complete: bool


class Arcs(NamedTuple):
    """Steps L → L' grouped by L', from `start[j]` to `start[j + 1]` those into row j.

    Attributes:
        source: Row of L.
        cached: M(∂(L') ∖ L), what the step adds to the cache.
        overhead: T(V' ∖ ∂(L')), what it adds to t; less than nothing where the most overhead is sought.
        start: Where the steps into each row begin.
    """

    source: Small
    cached: Floats
    overhead: Floats
    start: Ints


class Steps(NamedTuple):
    """What the dynamic program reads.

    Attributes:
        arcs: The steps.
        memory: M(L) of each row.
        beyond: What the backward of its last part holds outside of it.
        budget: The memory allowed.
    """

    arcs: Arcs
    memory: Floats
    beyond: Floats
    budget: float


class States(NamedTuple):
    """Pareto fronts: overhead t, cached memory m, and the position of the state each came from, -1 for none."""

    t: Floats
    m: Floats
    parent: Ints


@njit
def list_arcs(family: Family) -> Arcs:
    """All steps L → L' with L ⊊ L', but those that two shorter steps replace at no loss."""
    count, size = len(family.words), 0
    source, cached, overhead = np.empty(1 << 12, np.int32), np.empty(1 << 12), np.empty(1 << 12)
    start = np.zeros(count + 1, np.int64)
    for j in range(1, count):
        while size + j > len(source):
            source = np.concatenate((source, np.empty_like(source)))
            cached = np.concatenate((cached, np.empty_like(cached)))
            overhead = np.concatenate((overhead, np.empty_like(overhead)))
        size = _list_arcs_into(family, j, source, cached, overhead, size)
        start[j + 1] = size
    return Arcs(source[:size].copy(), cached[:size].copy(), overhead[:size].copy(), start)


@njit
def _list_arcs_into(family: Family, j: int, source: Small, cached: Floats, overhead: Floats, size: int) -> int:
    """Appends the steps into row j to the `size` that are listed; how many these are then."""
    words, depends = family.words, family.depends
    for i in range(j):
        if not _is_within(words, i, words, j):
            continue
        memory, time, is_replaced = 0.0, family.total[j] - family.total[i], False
        for p in range(family.boundary_start[j], family.boundary_start[j + 1]):
            b: int = family.boundary_nodes[p]
            if (words[i, b >> 6] >> np.uint64(b & 63)) & np.uint64(1):
                continue
            memory += family.memories[b]
            time -= family.times[b]
            # L_b itself is in every family.
            if family.is_complete or _is_within(words, i, depends, b):
                is_replaced = _is_halfway(words, i, j, depends, family.leaking, family.boundary, b)
                if is_replaced:
                    break
        if not is_replaced:
            source[size], cached[size], overhead[size] = i, memory, max(time, 0.0)
            size += 1
    return size


@njit
def _is_within(sets: Words, i: int, others: Words, j: int) -> bool:
    """Whether set i of the first is a part of set j of the others."""
    for w in range(sets.shape[1]):  # noqa: SIM110
        if sets[i, w] & ~others[j, w]:
            return False
    return True


@njit
def _is_halfway(words: Words, i: int, j: int, depends: Words, leaking: Words, boundary: Words, b: int) -> bool:
    """Whether the step from row i to row j may lead through M = L ∪ L_b, for b in ∂(L') ∖ L, at no loss.

    If M ≠ L' and ∂(M) ∖ L ⊆ ∂(L'), then L → M → L' caches the same nodes, counts the same overhead and by equation (2)
    peaks no higher: what the backward of M∖L holds beyond M is part of L'∖M or of what L' holds beyond itself. A node
    of L_b is in ∂(M) exactly if it has a successor that b does not depend on (`leaking`).
    """
    is_all = True
    for w in range(words.shape[1]):
        if words[j, w] & ~words[i, w] & ~depends[b, w]:
            is_all = False
        if leaking[b, w] & ~words[i, w] & ~boundary[j, w]:
            return False
    return not is_all


@njit
def _room(p: Steps, i: int, j: int) -> float:
    """The largest m with which a step from row i to row j is within the budget, by equation (2)."""
    return p.budget - 2 * (p.memory[j] - p.memory[i]) - p.beyond[j]


@njit
def least_cached(p: Steps) -> Floats:
    """For each row the least m of a state that the budget allows; infinite where there is none."""
    count = len(p.memory)
    least = np.full(count, np.inf)
    least[0] = 0.0
    for j in range(1, count):
        for a in range(p.arcs.start[j], p.arcs.start[j + 1]):
            i = p.arcs.source[a]
            if least[i] <= _room(p, i, j):
                least[j] = min(least[j], least[i] + p.arcs.cached[a])
    return least


@njit
def most_cached(p: Steps) -> Floats:
    """For each row the largest m from which V can be reached within the budget; minus infinity where there is none."""
    count = len(p.memory)
    most = np.full(count, -np.inf)
    most[count - 1] = np.inf
    for j in range(count - 1, 0, -1):
        for a in range(p.arcs.start[j], p.arcs.start[j + 1]):
            i = p.arcs.source[a]
            most[i] = max(most[i], min(_room(p, i, j), most[j] - p.arcs.cached[a]))
    return most


@njit
def bounds(p: Steps, least: Floats, most: Floats, num_cells: int, width: float) -> NDArray[np.float32]:
    """A lower bound on what is still to be added to t from row i with m in cell k = ⌊m/width⌋, never falling in k.

    The same program run backwards on a grid whose rounding favours the bound. In single precision, for speed: the
    caller allows for its rounding.
    """
    count = len(p.memory)
    bound = np.full((count, num_cells), np.inf, np.float32)
    bound[count - 1, :] = 0.0
    for j in range(count - 1, 0, -1):
        if least[j] > most[j]:
            continue
        if j < count - 1:
            lowest = int(least[j] / width)
            bound[j, :lowest] = bound[j, lowest]
        into = bound[j]
        for a in range(p.arcs.start[j], p.arcs.start[j + 1]):
            i = p.arcs.source[a]
            room = min(_room(p, i, j), most[j] - p.arcs.cached[a])
            if room < least[i]:
                continue
            shift = int(p.arcs.cached[a] / width)
            first, last = int(least[i] / width), min(int(room / width) + 1, num_cells - shift)
            if first >= last:
                continue
            row, beyond_it = bound[i, first:last], into[first + shift : last + shift]
            added = np.float32(p.arcs.overhead[a])
            for k in range(row.size):
                row[k] = min(row[k], beyond_it[k] + added)
    if count > 1:
        lowest = int(least[0] / width)
        bound[0, :lowest] = bound[0, lowest]
    return bound


@njit
def fronts(
    p: Steps, least: Floats, most: Floats, bound: NDArray[np.float32], width: float, limit: float
) -> tuple[States, Ints]:
    """For each row the Pareto front of (t, m) within the budget, without states whose bound exceeds `limit`.

    Returns:
        The states, ascending in m within a row, and where each row begins.
    """
    count, num_cells = bound.shape
    every = _states(1 << 12)
    every.t[0], every.m[0], every.parent[0] = 0.0, 0.0, -1
    begin = np.zeros(count + 1, np.int64)
    begin[1] = 1
    here = _states(1 << 10)
    for j in range(1, count):
        size = 0
        if least[j] <= most[j]:
            for a in range(p.arcs.start[j + 1] - 1, p.arcs.start[j] - 1, -1):
                i: int = p.arcs.source[a]
                if size + begin[i + 1] - begin[i] > len(here.t):
                    here = _wider(here, size, size + begin[i + 1] - begin[i])
                room = min(_room(p, i, j), most[j] - p.arcs.cached[a])
                for s in range(begin[i], begin[i + 1]):
                    if every.m[s] > room:
                        break
                    t, m = every.t[s] + p.arcs.overhead[a], every.m[s] + p.arcs.cached[a]
                    if t + bound[j, min(int(m / width), num_cells - 1)] <= limit:
                        size = _insert(here, size, t, m, s)
        at = begin[j]
        begin[j + 1] = at + size
        if at + size > len(every.t):
            every = _wider(every, at, at + size)
        every.t[at : at + size] = here.t[:size]
        every.m[at : at + size] = here.m[:size]
        every.parent[at : at + size] = here.parent[:size]
    return every, begin


@njit
def _states(size: int) -> States:
    return States(np.empty(size), np.empty(size), np.empty(size, np.int64))


@njit
def _wider(states: States, size: int, needed: int) -> States:
    """The first `size` states with room for more than as many as are needed."""
    wider = _states(2 * needed)
    wider.t[:size] = states.t[:size]
    wider.m[:size] = states.m[:size]
    wider.parent[:size] = states.parent[:size]
    return wider


@njit
def _insert(front: States, size: int, t: float, m: float, parent: int) -> int:
    """Adds a state to the `size` of a front unless one of them is as good, drops those that it beats; the new size."""
    low = int(np.searchsorted(front.m[:size], m, side="right"))  # the first state with more memory
    if low > 0 and front.t[low - 1] <= t:
        return size
    if low > 0 and front.m[low - 1] == m:
        low -= 1
    end = low  # what the new state dominates stands in low to end
    while end < size and front.t[end] >= t:
        end += 1
    if end == low:
        for q in range(size, low, -1):
            _move(front, q - 1, q)
    else:
        for q in range(end, size):
            _move(front, q, q + low + 1 - end)
    front.t[low], front.m[low], front.parent[low] = t, m, parent
    return size + low + 1 - end


@njit
def _move(front: States, place: int, to: int) -> None:
    front.t[to], front.m[to], front.parent[to] = front.t[place], front.m[place], front.parent[place]
