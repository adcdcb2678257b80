"""The recurrence of beaumont2024's dynamic programs, equations (1)-(7), stated once.

A sequence of state (s, t, l) begins in one of three ways, each a `Move` to a later state. What evaluates the recurrence
differs in what it adds up: the least memory (`least_memory`), makespans over slots (`slots`), makespans as step
functions of memory (`fronts`), and the moves of one sequence (`backtrack`).

Equation (2) has no way to move the floating activation right before a `Fall`; here the move is a step of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...schedules.compiled import Ints, njit
from .problem import Problem


class Move(NamedTuple):
    """Some forward operations, after which the rest of a sequence is one of another state.

    Attributes:
        needed: Memory for the operations.
        seconds: Their time.
        row: Of that state in a table.
        taken: Memory that it does not have, for what was kept.
        freed: Memory that it has in turn, for what was dropped.
    """

    needed: int
    seconds: float
    row: int
    taken: int
    freed: int


@njit
def row(p: Problem, s: int, t: int, last: int) -> int:
    """The row of state (s, t, l) in a table."""
    return p.state_row[s, t] + last - t


@njit
def rest_row(p: Problem, s: int, t: int, u: int) -> int:
    """The row of state (s, t, u - 1) after a kept activation has served the backwards down to u.

    Where that is one `Fall` and `B`, the activation kept was a^s, and is there still: a row of its own.
    """
    return p.num_rows - p.num_stages + s - 1 if u == s + 1 else row(p, s, t, u - 1)


@njit
def whole_row(p: Problem) -> int:
    """The row of the whole chain."""
    return row(p, 1, 1, p.num_stages)


@njit
def kept_leaf_threshold(p: Problem, s: int) -> int:
    """Memory for `Fall` and `B` of stage s where a^s is there still."""
    return p.costs.held[s] + p.costs.kept_leaf_peak[s]


@njit
def leaf_threshold(p: Problem, s: int) -> int:
    """Memory for `Fall` and `B` of stage s right after each other."""
    return p.costs.held[s] + p.costs.leaf_peak[s]


@njit
def tape_move(p: Problem, s: int, last: int) -> Move:
    """`Fall` of stage s < l, whose tape stays for its `B` (equation 5, with m_all of Theorems 4.7 and 4.8)."""
    c = p.costs
    needed = max(c.held[last] + c.fall_peak[s], c.back_peak[s])
    return Move(needed, c.forward_seconds[s] + c.backward_seconds[s], row(p, s + 1, s + 1, last), c.tape[s], 0)


@njit
def keep_move(p: Problem, s: int, k: int, u: int, last: int) -> Move:
    """`Fck` of s and on to a^(k-1), which is kept and serves the backwards from l down to u (equations 3 and 4).

    The state of `rest_row` follows that one.
    """
    seconds = p.elapsed[k - 1] - p.elapsed[s - 1]
    return Move(p.costs.held[last] + p.run[s, k - 1], seconds, row(p, k, u, last), p.costs.output[k - 1], 0)


@njit
def float_move(p: Problem, s: int, r: int, t: int, last: int) -> Move:
    """`Fn` of stages s to r - 1, which drop a^(s-1) and leave a^(r-1) floating in its place."""
    c = p.costs
    needed = c.held[last] + max(c.keep_peak[s], p.tail[s, r - 1] - c.output[s - 1])
    seconds = p.elapsed[r - 1] - p.elapsed[s - 1]
    return Move(needed, seconds, row(p, r, t, last), c.output[r - 1], c.output[s - 1])


@njit
def ends_until(p: Problem, s: int, last: int) -> Ints:
    """The t, ascending, of the states (s, t, l)."""
    ends = p.ends[s, : p.num_ends[s]]
    return ends[: np.searchsorted(ends, last, side="right")]


@njit
def bases_after(p: Problem, s: int, u: int) -> Ints:
    """The k > s, ascending, of the states (k, u, .): where a^(k-1) may be kept for the backwards down to u."""
    bases = p.bases[u, : p.num_bases[u]]
    return bases[np.searchsorted(bases, s, side="right") :]


@njit
def floats_to(p: Problem, s: int, t: int) -> Ints:
    """The r, ascending, of the states (r, t, .) whose a^(r-1) may replace a^(s-1): larger ones (Corollary 4.5)."""
    bases = bases_after(p, s, t)
    return bases[p.costs.output[bases - 1] > p.costs.output[s - 1]]


@njit
def least_memory(p: Problem) -> Ints:
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
                segment[u] = infinite
                for k in bases_after(p, s, u):
                    segment[u] = min(segment[u], _needed(need, keep_move(p, s, k, u, last)))
            for t in ends_until(p, s, last):
                least = infinite
                if s == last:
                    least = leaf_threshold(p, s)
                elif s == t and p.keeps_tapes:
                    least = _needed(need, tape_move(p, s, last))
                for u in range(t + 1, last + 1):
                    least = min(least, max(segment[u], need[rest_row(p, s, t, u)]))
                for r in floats_to(p, s, t):
                    least = min(least, _needed(need, float_move(p, s, r, t, last)))
                need[row(p, s, t, last)] = least
    return need


@njit
def _needed(need: Ints, move: Move) -> int:
    return max(move.needed, need[move.row] + move.taken - move.freed)
