"""The makespan table of beaumont2024's dynamic programs in exact memory: a step function of memory for each state."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...schedules.compiled import njit
from .memory import all_threshold, kept_leaf_threshold, move_threshold, rest_row, row

# A step function is (memory ascending, makespan strictly descending): from memory[i] on, the makespan is seconds[i].


@njit
def _step_sum(
    first_m: Any, first_c: Any, shift: int, second_m: Any, second_c: Any, seconds: Any, start: int, stop: int
) -> Any:
    """seconds + first(m - shift) + second(m) on [start, stop], as a step function."""
    out_m = np.empty(len(first_m) + len(second_m), dtype=np.int64)
    out_c = np.empty(len(out_m), dtype=np.float64)
    size, i, j = 0, 0, 0
    if len(first_m) == 0 or len(second_m) == 0:
        return out_m[:0], out_c[:0]
    at = max(start, first_m[0] + shift, second_m[0])
    while at <= stop:
        while i + 1 < len(first_m) and first_m[i + 1] + shift <= at:
            i += 1
        while j + 1 < len(second_m) and second_m[j + 1] <= at:
            j += 1
        out_m[size] = at
        out_c[size] = seconds + first_c[i] + second_c[j]
        size += 1
        after = stop + 1
        if i + 1 < len(first_m):
            after = min(after, first_m[i + 1] + shift)
        if j + 1 < len(second_m):
            after = min(after, second_m[j + 1])
        at = after
    return out_m[:size], out_c[:size]


@njit
def _step_least(first_m: Any, first_c: Any, second_m: Any, second_c: Any) -> Any:
    """The pointwise minimum of two step functions."""
    if len(second_m) == 0:
        return first_m, first_c
    out_m = np.empty(len(first_m) + len(second_m), dtype=np.int64)
    out_c = np.empty(len(out_m), dtype=np.float64)
    size, i, j = 0, 0, 0
    least = np.inf
    while i < len(first_m) or j < len(second_m):
        if j == len(second_m) or (i < len(first_m) and first_m[i] <= second_m[j]):
            at, value = first_m[i], first_c[i]
            i += 1
        else:
            at, value = second_m[j], second_c[j]
            j += 1
        if value < least:
            least = value
            if size > 0 and out_m[size - 1] == at:
                size -= 1
            out_m[size], out_c[size] = at, value
            size += 1
    return out_m[:size], out_c[:size]


@njit
def fill_fronts(p: Any, memory: int, limit: int) -> Any:
    """(memories, makespans, bounds): row i of the table is the slice bounds[i] : bounds[i + 1] stood in row order.

    Exact where no row has more than `limit` steps. A longer one is thinned to `limit`, its first and last kept: the
    makespans are then of sequences that still fit, and the least memory stays exact.

    Args:
        p: The problem.
        memory: The most memory of interest beyond a^0.
        limit: The most steps a row.

    Returns:
        Two flat arrays, and for each row its first and its last index plus one in them.

    Reference:
        Beaumont et al. 2024, equations (1)-(7); the move of the floating activation is a step of its own.
    """
    n = p.num_stages
    capacity = 4096 + n
    all_m = np.empty(capacity, dtype=np.int64)
    all_c = np.empty(capacity, dtype=np.float64)
    bounds = np.zeros((p.num_rows, 2), dtype=np.int64)
    used = n
    for s in range(1, n + 1):
        all_m[s - 1] = kept_leaf_threshold(p, s)
        all_c[s - 1] = p.kept_leaf_seconds[s] + p.backward_seconds[s]
        index = rest_row(p, s, s, s + 1)
        bounds[index, 0], bounds[index, 1] = s - 1, s
    zero_m, zero_c = np.full(1, -(np.int64(1) << 61)), np.zeros(1)
    none_m, none_c = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float64)
    for last in range(1, n + 1):
        for s in range(last, 0, -1):
            # a^0 stays for the whole time, and a^(s-1) beside it (inside a tape, it may be smaller).
            stop = memory if s == 1 else memory - min(p.output[s - 1], p.tape[s - 1])
            num_t = last - s + 1
            segments_m = [none_m for _ in range(num_t)]
            segments_c = [none_c for _ in range(num_t)]
            for u in range(s + 1, last + 1):
                best_m, best_c = none_m, none_c
                for k in p.bases[u, : p.num_bases[u]]:
                    if k > s:
                        lo, hi = bounds[row(p, k, u, last)]
                        run = p.held[last] + p.run[s, k - 1]
                        seconds = p.elapsed[k - 1] - p.elapsed[s - 1]
                        new_m, new_c = _step_sum(
                            all_m[lo:hi], all_c[lo:hi], p.output[k - 1], zero_m, zero_c, seconds, run, stop
                        )
                        best_m, best_c = _step_least(best_m, best_c, new_m, new_c)
                segments_m[u - s], segments_c[u - s] = best_m, best_c
            for t in p.ends[s, : p.num_ends[s]]:
                if t > last:
                    break
                best_m, best_c = none_m, none_c
                threshold = all_threshold(p, s, last)
                if s == t and s == last:
                    if threshold <= stop:
                        best_m = np.full(1, threshold)
                        best_c = np.full(1, p.leaf_seconds[s] + p.backward_seconds[s])
                elif s == t and p.keeps_tapes:
                    lo, hi = bounds[row(p, s + 1, s + 1, last)]
                    seconds = p.forward_seconds[s] + p.backward_seconds[s]
                    best_m, best_c = _step_sum(
                        all_m[lo:hi], all_c[lo:hi], p.tape[s], zero_m, zero_c, seconds, threshold, stop
                    )
                for u in range(t + 1, last + 1):
                    lo, hi = bounds[rest_row(p, s, t, u)]
                    new_m, new_c = _step_sum(
                        segments_m[u - s], segments_c[u - s], 0, all_m[lo:hi], all_c[lo:hi], 0.0, 0, stop
                    )
                    best_m, best_c = _step_least(best_m, best_c, new_m, new_c)
                for r in p.bases[t, : p.num_bases[t]]:
                    if r > s and p.output[r - 1] > p.output[s - 1]:
                        lo, hi = bounds[row(p, r, t, last)]
                        grown = p.output[r - 1] - p.output[s - 1]
                        seconds = p.elapsed[r - 1] - p.elapsed[s - 1]
                        move = move_threshold(p, s, r, last)
                        new_m, new_c = _step_sum(all_m[lo:hi], all_c[lo:hi], grown, zero_m, zero_c, seconds, move, stop)
                        best_m, best_c = _step_least(best_m, best_c, new_m, new_c)
                size = len(best_m)
                if size > limit:
                    chosen = np.linspace(0, size - 1, limit).astype(np.int64)
                    best_m, best_c, size = best_m[chosen], best_c[chosen], limit
                while used + size > capacity:
                    capacity *= 2
                    all_m = np.concatenate((all_m, np.empty(capacity - len(all_m), dtype=np.int64)))
                    all_c = np.concatenate((all_c, np.empty(capacity - len(all_c), dtype=np.float64)))
                all_m[used : used + size] = best_m
                all_c[used : used + size] = best_c
                index = row(p, s, t, last)
                bounds[index, 0], bounds[index, 1] = used, used + size
                used += size
    return all_m[:used], all_c[:used], bounds
