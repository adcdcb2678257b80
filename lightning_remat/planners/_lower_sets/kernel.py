"""The dynamic program over lower sets, compiled: steps between lower sets, memory limits, bounds, Pareto fronts.

Rows are lower sets by ascending size, row 0 is ∅ and the last row V. A state is a triplet (L, t, m) of kusumoto2019
section 4.2: the lower set, the overhead so far and the memory cached so far. Memory is in whole units held as floats.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...schedules.compiled import njit


class Arcs(NamedTuple):
    """Steps L → L' grouped by L', from `start[j]` to `start[j + 1]` those into row j.

    Attributes:
        source: Row of L.
        cached: M(∂(L') ∖ L), what the step adds to the cache.
        overhead: T(V' ∖ ∂(L')), what it adds to the overhead.
        start: Where the steps into each row begin.
    """

    source: Any
    cached: Any
    overhead: Any
    start: Any


@njit
def list_arcs(
    words: Any,
    boundary: Any,
    boundary_nodes: Any,
    boundary_start: Any,
    time_of: Any,
    times: Any,
    memories: Any,
    depends: Any,
    leaking: Any,
    is_complete: bool,
) -> Any:
    """All steps L → L' with L ⊊ L', but those that two shorter steps replace at no loss.

    For b in ∂(L') ∖ L let M = L ∪ L_b. If M ≠ L' and ∂(M) ∖ L ⊆ ∂(L'), then L → M → L' caches the same nodes, counts
    the same overhead and by equation (2) peaks no higher: what the backward of M∖L holds beyond M is part of
    L'∖M or of what L' holds beyond itself. A node of L_b is in ∂(M) exactly if it has a successor that b does not
    depend on (`leaking`).
    """
    count, num_words = words.shape
    capacity, size = 1 << 12, 0
    source = np.empty(capacity, np.int32)
    cached = np.empty(capacity, np.float64)
    overhead = np.empty(capacity, np.float64)
    start = np.zeros(count + 1, np.int64)
    one = np.uint64(1)
    for j in range(1, count):
        for i in range(j):
            is_subset = True
            for w in range(num_words):
                if words[i, w] & ~words[j, w]:
                    is_subset = False
                    break
            if not is_subset:
                continue
            memory, time, is_replaced = 0.0, time_of[j] - time_of[i], False
            for p in range(boundary_start[j], boundary_start[j + 1]):
                b = boundary_nodes[p]
                if (words[i, b >> 6] >> np.uint64(b & 63)) & one:
                    continue
                memory += memories[b]
                time -= times[b]
                is_all, is_leaking, is_member = True, False, is_complete
                if not is_complete:  # L_b itself is in every family
                    is_member = True
                    for w in range(num_words):
                        if words[i, w] & ~depends[b, w]:
                            is_member = False
                            break
                if is_member:
                    for w in range(num_words):
                        if words[j, w] & ~words[i, w] & ~depends[b, w]:
                            is_all = False
                        if leaking[b, w] & ~words[i, w] & ~boundary[j, w]:
                            is_leaking = True
                            break
                    if not is_leaking and not is_all:
                        is_replaced = True
                        break
            if is_replaced:
                continue
            if size == capacity:
                capacity *= 2
                old_source, old_cached, old_overhead = source, cached, overhead
                source = np.empty(capacity, np.int32)
                cached = np.empty(capacity, np.float64)
                overhead = np.empty(capacity, np.float64)
                source[:size] = old_source
                cached[:size] = old_cached
                overhead[:size] = old_overhead
            source[size], cached[size], overhead[size] = i, memory, max(time, 0.0)
            size += 1
        start[j + 1] = size
    return source[:size].copy(), cached[:size].copy(), overhead[:size].copy(), start


@njit
def least_cached(source: Any, cached: Any, start: Any, memory: Any, beyond: Any, budget: float) -> Any:
    """For each row the least m of a state that the budget allows; infinite where there is none."""
    count = len(memory)
    least = np.full(count, np.inf)
    least[0] = 0.0
    for j in range(1, count):
        best = np.inf
        for a in range(start[j], start[j + 1]):
            i = source[a]
            if least[i] + 2 * (memory[j] - memory[i]) + beyond[j] <= budget:
                best = min(best, least[i] + cached[a])
        least[j] = best
    return least


@njit
def most_cached(source: Any, cached: Any, start: Any, memory: Any, beyond: Any, budget: float) -> Any:
    """For each row the largest m from which V can be reached within the budget; minus infinity where there is none."""
    count = len(memory)
    most = np.full(count, -np.inf)
    most[count - 1] = np.inf
    for j in range(count - 1, 0, -1):
        for a in range(start[j], start[j + 1]):
            i = source[a]
            room = min(budget - 2 * (memory[j] - memory[i]) - beyond[j], most[j] - cached[a])
            most[i] = max(most[i], room)
    return most


@njit
def bounds(
    source: Any,
    cached: Any,
    gain: Any,
    start: Any,
    memory: Any,
    beyond: Any,
    budget: float,
    least: Any,
    most: Any,
    num_cells: int,
    width: float,
) -> Any:
    """A lower bound on what is still to be added to t from row i with m in cell k = ⌊m/width⌋, never falling in k.

    The same program run backwards on a grid whose rounding favours the bound. `gain` is what a step adds to t. In
    single precision, for speed: the caller allows for its rounding.
    """
    count = len(memory)
    bound = np.full((count, num_cells), np.inf, np.float32)
    bound[count - 1, :] = 0.0
    for j in range(count - 1, 0, -1):
        if least[j] > most[j]:
            continue
        if j < count - 1:
            lowest = int(least[j] / width)
            for k in range(lowest):
                bound[j, k] = bound[j, lowest]
        into = bound[j]
        for a in range(start[j], start[j + 1]):
            i = source[a]
            room = min(budget - 2 * (memory[j] - memory[i]) - beyond[j], most[j] - cached[a])
            if room < least[i]:
                continue
            shift = int(cached[a] / width)
            first, last = int(least[i] / width), min(int(room / width) + 1, num_cells - shift)
            if first >= last:
                continue
            row, beyond_it, added = bound[i, first:last], into[first + shift : last + shift], np.float32(gain[a])
            for k in range(row.size):
                row[k] = min(row[k], beyond_it[k] + added)
    if count > 1:
        for k in range(int(least[0] / width)):
            bound[0, k] = bound[0, int(least[0] / width)]
    return bound


@njit
def fronts(
    source: Any,
    cached: Any,
    gain: Any,
    start: Any,
    memory: Any,
    beyond: Any,
    budget: float,
    least: Any,
    most: Any,
    bound: Any,
    width: float,
    limit: float,
) -> Any:
    """For each row the Pareto front of (t, m) within the budget, without states whose bound exceeds `limit`.

    Returns:
        t, m (ascending in m within a row), the position of the state each came from, and where each row begins.
    """
    count, num_cells = bound.shape
    capacity = 1 << 12
    all_t = np.empty(capacity, np.float64)
    all_m = np.empty(capacity, np.float64)
    parent = np.empty(capacity, np.int64)
    all_t[0], all_m[0], parent[0] = 0.0, 0.0, -1
    begin = np.zeros(count + 1, np.int64)
    begin[1] = 1
    room_here = 1 << 10
    here_t = np.empty(room_here, np.float64)
    here_m = np.empty(room_here, np.float64)
    here_p = np.empty(room_here, np.int64)
    for j in range(1, count):
        size = 0
        if least[j] <= most[j]:
            for a in range(start[j + 1] - 1, start[j] - 1, -1):
                i = source[a]
                if begin[i] == begin[i + 1]:
                    continue
                room = min(budget - 2 * (memory[j] - memory[i]) - beyond[j], most[j] - cached[a])
                for s in range(begin[i], begin[i + 1]):
                    if all_m[s] > room:
                        break
                    t, m = all_t[s] + gain[a], all_m[s] + cached[a]
                    if t + bound[j, min(int(m / width), num_cells - 1)] > limit:
                        continue
                    low, high = 0, size  # the first state here with more memory
                    while low < high:
                        middle = (low + high) >> 1
                        if here_m[middle] > m:
                            high = middle
                        else:
                            low = middle + 1
                    if low > 0 and here_t[low - 1] <= t:
                        continue
                    if low > 0 and here_m[low - 1] == m:
                        low -= 1
                    end = low  # what the new state dominates stands in low to end
                    while end < size and here_t[end] >= t:
                        end += 1
                    if end == low:
                        if size == room_here:
                            room_here *= 2
                            old_t, old_m, old_p = here_t, here_m, here_p
                            here_t = np.empty(room_here, np.float64)
                            here_m = np.empty(room_here, np.float64)
                            here_p = np.empty(room_here, np.int64)
                            here_t[:size] = old_t
                            here_m[:size] = old_m
                            here_p[:size] = old_p
                        for q in range(size, low, -1):
                            here_t[q], here_m[q], here_p[q] = here_t[q - 1], here_m[q - 1], here_p[q - 1]
                        size += 1
                    elif end > low + 1:
                        gone = end - low - 1
                        for q in range(end, size):
                            here_t[q - gone], here_m[q - gone], here_p[q - gone] = here_t[q], here_m[q], here_p[q]
                        size -= gone
                    here_t[low], here_m[low], here_p[low] = t, m, s
        at = begin[j]
        if at + size > capacity:
            capacity = 2 * capacity + size
            wide_t = np.empty(capacity, np.float64)
            wide_m = np.empty(capacity, np.float64)
            wide_p = np.empty(capacity, np.int64)
            wide_t[:at] = all_t[:at]
            wide_m[:at] = all_m[:at]
            wide_p[:at] = parent[:at]
            all_t, all_m, parent = wide_t, wide_m, wide_p
        all_t[at : at + size] = here_t[:size]
        all_m[at : at + size] = here_m[:size]
        parent[at : at + size] = here_p[:size]
        begin[j + 1] = at + size
    end = begin[count]
    return all_t[:end], all_m[:end], parent[:end], begin
