"""From a makespan table back to the sequence that has the makespan (beaumont2024, Algorithms 2 and 4)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...schedules.compiled import Floats, Ints, njit
from .problem import Problem
from .recurrence import Move, bases_after, float_move, floats_to, keep_move, rest_row, row, tape_move
from .slots import slots_of, slots_of_move
from .steps import BACK, FALL, FCK, FN, KINDS

_STATE = len(KINDS)
"""The kind of an entry on the stack of `walk` that is a state and no operation."""


class Table(NamedTuple):
    """Makespans of all states, either over uniform slots or as step functions.

    Attributes:
        slot: Units of memory in a slot; 1 for step functions.
        uniform: uniform[row, m] over slots; of no rows where the table is step functions.
        memories: Where the step functions step.
        makespans: Their values from there on.
        bounds: First index of each row in those, and its last plus one; of no rows where the table is uniform.
    """

    slot: int
    uniform: Floats
    memories: Ints
    makespans: Floats
    bounds: Ints


@njit
def _value(table: Table, index: int, m: int) -> float:
    """The makespan that row `index` has at m slots; infinite where nothing fits."""
    if len(table.bounds) == 0:
        return table.uniform[index, m] if m >= 0 else np.inf
    first, end = table.bounds[index]
    position = int(np.searchsorted(table.memories[first:end], m, side="right"))
    return table.makespans[int(first) + position - 1] if position > 0 else np.inf


@njit
def _makespan(table: Table, move: Move, m: int) -> float:
    """The least makespan of sequences of m slots that begin with a move; infinite where none fits."""
    needed, shift = slots_of_move(move, table.slot)
    return move.seconds + _value(table, move.row, m - shift) if m >= needed else np.inf


class Choices(NamedTuple):
    """Steps chosen before, for the sequences of one table share many: a cache with one place for each remainder.

    Attributes:
        states: [places, 2] row and slots of a state; -1 where there is none.
        steps: [places, 3] what `_best_step` chose there.
    """

    states: Ints
    steps: Ints


_NUM_PLACES = 1 << 17


def no_choices() -> Choices:
    """A cache with nothing in it."""
    return Choices(np.full((_NUM_PLACES, 2), -1), np.zeros((_NUM_PLACES, 3), np.int64))


@njit
def walk(p: Problem, table: Table, m: int, choices: Choices) -> tuple[Ints, Ints]:
    """(kinds, stages) of a sequence of the whole chain that fits m slots beyond a^0 and has the table's makespan.

    The table must be finite there; `choices` are those of earlier walks over it.
    """
    kinds = np.empty(1024, dtype=np.int64)
    stages = np.empty(1024, dtype=np.int64)
    size = 0
    stack = [(_STATE, 1, 1, p.num_stages, m)]
    while len(stack) > 0:
        kind, s, t, last, m = stack.pop()
        if size + last + 2 > len(kinds):
            kinds = np.concatenate((kinds, np.empty(len(kinds) + last, dtype=np.int64)))
            stages = np.concatenate((stages, np.empty(len(stages) + last, dtype=np.int64)))
        if kind == BACK:
            kinds[size], stages[size] = BACK, s
            size += 1
            continue
        if s == t and s == last:
            kinds[size], stages[size] = FALL, s
            kinds[size + 1], stages[size + 1] = BACK, s
            size += 2
            continue
        choice, keep, until = _known_step(p, table, s, t, last, m, choices)
        if choice == FALL:
            kinds[size], stages[size] = FALL, s
            size += 1
            stack.append((BACK, s, s, s, m))
            stack.append((_STATE, s + 1, s + 1, last, m - slots_of(p.costs.tape[s], table.slot)))
            continue
        for stage in range(s, keep):
            kinds[size], stages[size] = FCK if choice == FCK and stage == s else FN, stage
            size += 1
        shift = slots_of(p.costs.output[keep - 1], table.slot)
        if choice == FCK:
            stack.append((_STATE, s, t, until - 1, m))
            stack.append((_STATE, keep, until, last, m - shift))
        else:
            stack.append((_STATE, keep, t, last, m - shift + slots_of(p.costs.output[s - 1], table.slot)))
    return kinds[:size], stages[:size]


@njit
def _known_step(p: Problem, table: Table, s: int, t: int, last: int, m: int, choices: Choices) -> tuple[int, int, int]:
    """As `_best_step`, looked up where it was asked before."""
    index = row(p, s, t, last)
    place = (index * 1_000_003 + m) % len(choices.states)
    if choices.states[place, 0] != index or choices.states[place, 1] != m:
        choices.steps[place] = _best_step(p, table, s, t, last, m)
        choices.states[place] = index, m
    choice, keep, until = choices.steps[place]
    return choice, keep, until


@njit
def _best_step(p: Problem, table: Table, s: int, t: int, last: int, m: int) -> tuple[int, int, int]:
    """(operation, k, u): how a fastest sequence of state (s, t, last) with m slots begins.

    `Fall`; or `Fck` of s and on to the next activation a^(k-1) that is kept, which serves the backwards down to u; or
    `Fn` until a^(k-1) has replaced a^(s-1).
    """
    best, choice, keep, until = np.inf, _STATE, 0, 0
    if s == t and p.keeps_tapes:
        best, choice = _makespan(table, tape_move(p, s, last), m), FALL
    for u in range(t + 1, last + 1):
        rest = _value(table, rest_row(p, s, t, u), m)
        if rest == np.inf:
            continue
        for k in bases_after(p, s, u):
            total = _makespan(table, keep_move(p, s, k, u, last), m) + rest
            if total < best:
                best, choice, keep, until = total, FCK, k, u
    for r in floats_to(p, s, t):
        total = _makespan(table, float_move(p, s, r, t, last), m)
        if total < best:
            best, choice, keep = total, FN, r
    assert best < np.inf
    return choice, keep, until
