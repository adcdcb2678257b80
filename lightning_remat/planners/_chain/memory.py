"""What the states of a chain need of memory: thresholds of Theorems 4.7 and 4.8, and the least with which one fits."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...schedules.compiled import njit


@njit
def row(p: Any, s: int, t: int, last: int) -> Any:
    """The row of state (s, t, l) in a table."""
    return p.state_row[s, t] + last - t


@njit
def rest_row(p: Any, s: int, t: int, u: int) -> Any:
    """The row of state (s, t, u - 1) after a kept activation has served the backwards down to u.

    Where that is one `Fall` and `B`, the activation kept was a^s, and is there still: a row of its own.
    """
    return p.num_rows - p.num_stages + s - 1 if u == s + 1 else row(p, s, t, u - 1)


@njit
def kept_leaf_threshold(p: Any, s: int) -> Any:
    """Memory for `Fall` and `B` of stage s where a^s is there still."""
    return p.held[s] + p.kept_leaf_peak[s]


@njit
def all_threshold(p: Any, s: int, last: int) -> Any:
    """m_all^(s,l) of Theorems 4.7 and 4.8: memory for `Fall` and `B` of stage s, with delta^l held by the former."""
    if s == last:
        return p.held[s] + p.leaf_peak[s]
    return max(p.held[last] + p.fall_peak[s], p.back_peak[s])


@njit
def move_threshold(p: Any, s: int, r: int, last: int) -> Any:
    """Memory for `Fn` of stages s to r-1, which drop a^(s-1) and leave a^(r-1) in its place."""
    return p.held[last] + max(p.keep_peak[s], p.tail[s, r - 1] - p.output[s - 1])


@njit
def least_memory(p: Any) -> Any:
    """For each row of a table, the least memory with which its state has a sequence.

    Cost: O(L^3) for memory-persistent states, up to O(L^4) with floating ones.
    """
    n = p.num_stages
    infinite = np.int64(1) << 62
    need = np.full(p.num_rows, infinite, dtype=np.int64)
    segment = np.empty(n + 2, dtype=np.int64)
    for s in range(1, n + 1):
        need[rest_row(p, s, s, s + 1)] = kept_leaf_threshold(p, s)
    for last in range(1, n + 1):
        for s in range(last, 0, -1):
            # segment[u]: memory to run from a^(s-1) to the first kept activation and back down to stage u.
            for u in range(s + 1, last + 1):
                least = infinite
                for i in range(p.num_bases[u] - 1, -1, -1):
                    k = p.bases[u, i]
                    if k <= s:
                        break
                    run = p.held[last] + p.run[s, k - 1]
                    below = p.output[k - 1] + need[row(p, k, u, last)]
                    least = min(least, max(run, below))
                segment[u] = least
            for t in p.ends[s, : p.num_ends[s]]:
                if t > last:
                    break
                least = infinite
                if s == t and last == s:
                    least = all_threshold(p, s, last)
                elif s == t and p.keeps_tapes:
                    inner = p.tape[s] + need[row(p, s + 1, s + 1, last)]
                    least = max(all_threshold(p, s, last), inner)
                for u in range(t + 1, last + 1):
                    least = min(least, max(segment[u], need[rest_row(p, s, t, u)]))
                for r in p.bases[t, : p.num_bases[t]]:
                    if r > s and p.output[r - 1] > p.output[s - 1]:
                        grown = p.output[r - 1] - p.output[s - 1]
                        inner = need[row(p, r, t, last)] + grown
                        least = min(least, max(move_threshold(p, s, r, last), inner))
                need[row(p, s, t, last)] = least
    return need
