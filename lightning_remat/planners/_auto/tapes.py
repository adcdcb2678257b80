"""Tapes that stay where there is room: a recomputation that brings one too is watched tensor by tensor."""

from __future__ import annotations

import numpy as np

from ...budget import ALL_BYTES
from ...schedules.arrays import DISCARD, DISCARD_TAPE, RUN, GraphArrays
from ...schedules.compiled import Ints, Small, njit
from .residents import BOTH, Costs, before_all, do, uses_of, write


@njit
def tapes_kept(costs: Costs, actions: Small, limit: int) -> Small:
    """The same runs, with as many of the discarded tapes kept as fit, the smallest first.

    A batch norm or a layer norm has a tape of a few numbers a channel or a row; without it the executor must catch what
    a recomputation saves, and hook all that the first run does.

    Args:
        costs: Of the operations.
        actions: A valid schedule as numbers, its backwards in the reverse order of the nodes, and within the budget.
        limit: The true peak in bytes that must not be exceeded.

    Returns:
        The schedule as numbers; none where no tape is to be kept.
    """
    uses = uses_of(costs.arrays, actions)
    state = before_all(costs, uses)
    do(costs, uses, state, 0, len(uses.codes) - 1, BOTH, 0, ALL_BYTES)
    places, first, last = _early(costs.arrays, actions)
    tape_bytes = costs.arrays.tape_bytes[actions[places] >> 2]
    order = np.argsort(tape_bytes, kind="mergesort")
    fit, too_many = 0, len(order) + 1
    while fit + 1 < too_many:
        tried = (fit + too_many) // 2
        added = np.zeros(len(uses.codes) + 1, np.int64)
        for k in order[:tried]:
            added[first[k]] += tape_bytes[k]
            added[last[k] + 1] -= tape_bytes[k]
        if np.max(state.most + np.cumsum(added)[:-1]) <= limit:
            fit = tried
        else:
            too_many = tried
    if fit == 0:
        return np.empty(0, np.int32)
    stay = np.ones(len(actions), np.bool_)
    stay[places[order[:fit]]] = False
    uses, codes, at = uses_of(costs.arrays, actions[stay]), np.empty(len(actions), np.int32), 0
    for u in range(len(uses.codes)):
        at = write(uses, codes, at, u, u)
    return codes[:at]


@njit
def _early(arrays: GraphArrays, actions: Small) -> tuple[Ints, Ints, Ints]:
    """Those discards of a tape after which the operation runs again for its output, too.

    Returns:
        Their places among the actions, and the first and the last of the runs and backwards that a tape would see more
        of if it were kept.
    """
    count = len(arrays.root)
    waiting, used = np.full(count, -1), np.full(count, -1)  # of a tape its discard, and its last use before that
    has_output = np.zeros(count, np.bool_)
    places, first = np.empty(len(actions), np.int64), np.empty(len(actions), np.int64)
    last = np.empty(len(actions), np.int64)
    found, u = 0, 0
    for at in range(len(actions)):
        n, kind = actions[at] >> 2, actions[at] & 3
        if kind == DISCARD:
            has_output[n] = False
        elif kind == DISCARD_TAPE:
            waiting[n] = at
        else:
            if kind == RUN:
                if waiting[n] >= 0 and not has_output[n]:
                    places[found], first[found], last[found] = waiting[n], used[n] + 1, u
                    found += 1
                waiting[n] = -1
                has_output[n] = True
            used[n] = u
            u += 1
    return places[:found], first[:found], last[:found]
