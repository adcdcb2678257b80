"""Recomputations run earlier, together, where there is room: every stretch of them costs the host time of its own."""

from __future__ import annotations

import numpy as np

from ...budget import ALL_BYTES
from ...schedules.arrays import BACKWARD, RUN
from ...schedules.compiled import Ints, Small, njit
from .residents import BOTH, Costs, State, Uses, before_all, do, go_back, uses_of, write


@njit
def stretches_joined(costs: Costs, actions: Small, limit: int) -> Small:
    """The same runs, with stretches of the backward moved up to the end of an earlier one as long as they fit.

    From the first stretch on, each takes in as many of those after it as fit. What is alive between groups does not
    depend on them, so that none is in another's way. Where all parts of a group that fits fit as well - it begins
    later or ends earlier, as where memory falls from backward to backward - no other groups leave fewer stretches.

    A stretch that runs something again of which a backward on the way reads what was there before stays behind that
    backward, with all after it. So every value is there for the same uses, and of what the schedule costs nothing but
    stretches changes: it is never slower.

    Args:
        costs: Of the operations.
        actions: A valid schedule as numbers, its backwards in the reverse order of the nodes.
        limit: The true peak in bytes that must not be exceeded further than the schedule does as it is.

    Returns:
        The schedule as numbers; none where there is nothing to join.
    """
    uses = uses_of(costs.arrays, actions)
    ends = _ends_of_stretches(uses)
    state = before_all(costs, uses)
    if limit < ALL_BYTES:
        limit = max(limit, do(costs, uses, state, 0, len(uses.codes) - 1, BOTH, 0, ALL_BYTES))
        go_back(state, 0)
    group_end = np.arange(len(uses.codes))
    u, k, barred = 0, 0, 0
    while k < len(ends):
        place = ends[k]
        do(costs, uses, state, u, place, BOTH, 0, ALL_BYTES)
        u = place + 1
        barred = max(barred, u)  # the first run that may not follow; those before it may follow at any later place
        while barred < len(uses.codes) and (uses.codes[barred] & 3 == BACKWARD or uses.barrier[barred] <= place):
            barred += 1
        num_more = _most_that_fit(costs, uses, state, ends[k : np.searchsorted(ends, barred)], limit)
        group_end[place] = ends[k + num_more]
        k += num_more + 1
    is_joined = np.any(group_end > np.arange(len(uses.codes)))
    return _written(uses, group_end, len(actions)) if is_joined else np.empty(0, np.int32)


@njit
def _ends_of_stretches(uses: Uses) -> Ints:
    """The last use of each stretch that may be joined with others."""
    ends, found = np.empty(len(uses.codes), np.int64), 0
    for u in range(uses.first_again, len(uses.codes) - 1):  # a backward is the last
        if uses.codes[u] & 3 == RUN and uses.codes[u + 1] & 3 == BACKWARD:
            ends[found] = u
            found += 1
    return ends[:found]


@njit
def _most_that_fit(costs: Costs, uses: Uses, state: State, ends: Ints, limit: int) -> int:
    """How many stretches may follow the first one at its end: all, or so many as leaps and then halves of them tell."""
    fit, leap, too_many = 0, 1, len(ends) - 1
    if too_many <= 0 or _fits(costs, uses, state, ends[0], ends[too_many], limit):
        return max(0, too_many)
    while fit + 1 < too_many:
        tried = min(fit + leap, (fit + too_many) // 2)
        if _fits(costs, uses, state, ends[0], ends[tried], limit):
            fit, leap = tried, 2 * leap
        else:
            too_many = tried
    return fit


@njit
def _fits(costs: Costs, uses: Uses, state: State, place: int, end: int, limit: int) -> bool:
    """Whether the runs up to `end` may follow those up to `place`, after which the state is."""
    before = state.size[0]
    most = do(costs, uses, state, place + 1, end, RUN, place, limit)
    if most <= limit:
        most = do(costs, uses, state, place + 1, end, BACKWARD, end, limit)
    go_back(state, before)
    return most <= limit


@njit
def _written(uses: Uses, group_end: Ints, longest: int) -> Small:
    """The actions, with the runs up to the end of a group after its first stretch."""
    codes, at, u = np.empty(longest, np.int32), 0, 0
    while u < len(uses.codes):
        end = group_end[u]
        at = write(uses, codes, at, u, u)
        for v in range(u + 1, end + 1):
            if uses.codes[v] & 3 == RUN:
                at = write(uses, codes, at, v, u)
        for v in range(u + 1, end + 1):
            if uses.codes[v] & 3 == BACKWARD:
                at = write(uses, codes, at, v, end)
        u = end + 1
    return codes[:at]
