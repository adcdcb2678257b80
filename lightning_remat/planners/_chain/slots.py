"""The makespan table of beaumont2024's dynamic programs over uniform memory slots: fast, sizes rounded up to slots."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...schedules.compiled import njit, njit_numpy
from .memory import all_threshold, kept_leaf_threshold, move_threshold, rest_row, row

# Slots looked at together: a few cache lines.
_RUN = 64


@njit
def slots_of(size: int, slot: int) -> Any:
    """Slots that hold `size`: rounded up, so that a planned peak is never exceeded."""
    return -(-size // slot)


@njit_numpy
def _add_segment(best: Any, seconds: Any, above: Any, below: Any, start: Any, stop: Any, shift: Any) -> None:
    """best[m] <- min(best[m], seconds + above[m - shift] + below[m]) for m in [start, stop).

    All three fall with m, so that the ends of a run of slots tell whether it can improve anywhere: most cannot, and
    are not read.
    """
    begin = start
    while begin < stop:
        end = min(begin + _RUN, stop)
        if seconds + above[end - 1 - shift] + below[end - 1] < best[begin]:
            out, first, second = best[begin:end], above[begin - shift : end - shift], below[begin:end]
            for i in range(end - begin):
                value = seconds + first[i] + second[i]
                out[i] = value if value < out[i] else out[i]
        begin = end


@njit_numpy
def _add_shifted(best: Any, seconds: Any, source: Any, start: Any, stop: Any, shift: Any) -> None:
    """best[m] <- min(best[m], seconds + source[m - shift]) for m in [start, stop)."""
    length = stop - start
    if length > 0:
        out, first = best[start:stop], source[start - shift : stop - shift]
        for i in range(length):
            value = seconds + first[i]
            out[i] = value if value < out[i] else out[i]


@njit
def fill_slots(p: Any, slot: int, num_slots: int) -> Any:
    """table[row, m]: the least makespan of a state with m slots beyond a^(s-1); infinite where none fits.

    Exact for sizes that are multiples of `slot`; otherwise the makespan of sequences that fit in m slots. Cost:
    O(L^3 num_slots) for memory-persistent states, up to O(L^4 num_slots) with floating ones.

    Args:
        p: The problem.
        slot: Units of memory in a slot.
        num_slots: The most slots of interest.

    Reference:
        Beaumont et al. 2024, Algorithm 3 with equations (6)-(7), Algorithm 1 with equations (1)-(5). Equation (2) has
        no way to move the floating activation right before an `Fall`; here the move is a step of its own.
    """
    n = p.num_stages
    stop = num_slots + 1
    table = np.empty((p.num_rows, stop), dtype=np.float64)
    first = np.empty(p.num_rows, dtype=np.int64)
    segment = np.empty(stop, dtype=np.float64)
    for s in range(1, n + 1):
        index = rest_row(p, s, s, s + 1)
        lowest = slots_of(kept_leaf_threshold(p, s), slot)
        table[index, :lowest] = np.inf
        table[index, lowest:] = p.kept_leaf_seconds[s] + p.backward_seconds[s]
        first[index] = min(lowest, stop)
    for last in range(1, n + 1):
        # From `plenty` on nothing need be recomputed, and the makespan is the plain one.
        plenty, plain = np.int64(0), 0.0
        for s in range(last, 0, -1):
            threshold = all_threshold(p, s, last)
            plenty = (
                slots_of(threshold, slot)
                if s == last
                else max(slots_of(threshold, slot), slots_of(p.tape[s], slot) + plenty)
            )
            plain += (p.leaf_seconds[s] if s == last else p.forward_seconds[s]) + p.backward_seconds[s]
            own = table[row(p, s, s, last)]
            top = min(stop, plenty) if p.keeps_tapes or s == last else stop
            own[:top] = np.inf
            own[top:] = plain
            num_ends = np.searchsorted(p.ends[s, : p.num_ends[s]], last, side="right")
            for t in p.ends[s, 1:num_ends]:
                table[row(p, s, t, last)] = np.inf
            # F_all (eq. 5).
            if p.keeps_tapes and s < last:
                shift = slots_of(p.tape[s], slot)
                source = row(p, s + 1, s + 1, last)
                start = max(slots_of(threshold, slot), shift + first[source])
                seconds = p.forward_seconds[s] + p.backward_seconds[s]
                _add_shifted(own, seconds, table[source], start, top, shift)
            # F_ck (eqs. 3, 4): run to k, keep a^(k-1), back down to u, then on from a^(s-1).
            for u in range(s + 1, last + 1):
                num_rests = np.searchsorted(p.ends[s, :num_ends], u, side="left")
                skipped = np.searchsorted(p.bases[u, : p.num_bases[u]], s, side="right")
                keeps = p.bases[u, skipped : p.num_bases[u]]
                # With several of both, the part before a^(s-1)'s own turn is summed up once for all t.
                is_shared = len(keeps) > 1 and num_rests > 1
                lowest = stop
                if is_shared:
                    segment[:] = np.inf
                for k in keeps:
                    source = row(p, k, u, last)
                    shift = slots_of(p.output[k - 1], slot)
                    start = max(slots_of(p.held[last] + p.run[s, k - 1], slot), shift + first[source])
                    seconds = p.elapsed[k - 1] - p.elapsed[s - 1]
                    lowest = min(lowest, start)
                    if is_shared:
                        _add_shifted(segment, seconds, table[source], start, stop, shift)
                        continue
                    for t in p.ends[s, :num_rests]:
                        rest = rest_row(p, s, t, u)
                        best = table[row(p, s, t, last)]
                        begin, end = max(start, first[rest]), top if t == s else stop
                        _add_segment(best, seconds, table[source], table[rest], begin, end, shift)
                if is_shared:
                    for t in p.ends[s, :num_rests]:
                        rest = rest_row(p, s, t, u)
                        best = table[row(p, s, t, last)]
                        begin, end = max(lowest, first[rest]), top if t == s else stop
                        _add_segment(best, 0.0, segment, table[rest], begin, end, 0)
            for t in p.ends[s, :num_ends]:
                best = table[row(p, s, t, last)]
                # The floating activation moves on: F_0 from s to r-1 (Corollary 4.5).
                for r in p.bases[t, : p.num_bases[t]]:
                    if r > s and p.output[r - 1] > p.output[s - 1]:
                        source = row(p, r, t, last)
                        grown = slots_of(p.output[r - 1], slot) - slots_of(p.output[s - 1], slot)
                        move = slots_of(move_threshold(p, s, r, last), slot)
                        start = max(move, first[source] + grown)
                        seconds = p.elapsed[r - 1] - p.elapsed[s - 1]
                        _add_shifted(best, seconds, table[source], start, stop, grown)
                lowest = np.int64(0)
                while lowest < stop and best[lowest] == np.inf:
                    lowest += 1
                first[row(p, s, t, last)] = lowest
    return table
