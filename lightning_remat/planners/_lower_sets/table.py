"""A family of lower sets as arrays, and the steps between them that a sequence of lower sets may need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

import numpy as np
from numpy.typing import NDArray

from ...schedules.compiled import Floats, Ints, Small
from .kernel import Arcs, Family, Words, list_arcs
from .lower_sets import LowerSetProblem, ancestors, masks, members

_EXACT = 1 << 52  # integers up to here are exact as floats, with a bit to spare


@dataclass(frozen=True, slots=True)
class LowerSetTable:
    """What the dynamic program reads. Memory is counted in whole units, so that every sum of it is exact.

    Paper symbols: for the lower set L of row i, M(L) = `memory[i]`, M(δ⁺(L)∖L) + M(δ⁻(δ⁺(L))∖L) = `beyond[i]`.

    Attributes:
        masks: The lower sets as bit masks, ascending in size, from ∅ to V.
        memory: Memory of each lower set, in units.
        beyond: Memory outside of it that the backward of its last part holds, in units.
        arcs: The steps from a lower set to a larger one.
        unit: Memory of one unit in the problem's own unit, a power of two; 1 where all memories are integers.
        total_time: T(V).
    """

    masks: tuple[int, ...]
    memory: Floats
    beyond: Floats
    arcs: Arcs
    unit: Fraction
    total_time: float

    def units_of(self, budget: float) -> float:
        """The whole units that fit into `budget`."""
        return float("inf") if budget == float("inf") else float(floor(Fraction(budget) / self.unit))

    def amount_of(self, units: float) -> float:
        """`units` in the problem's own unit; an int where that is whole."""
        amount = Fraction(int(units)) * self.unit
        return int(amount) if amount.denominator == 1 else float(amount)


def tabulate(problem: LowerSetProblem, family: Sequence[int], *, is_complete: bool) -> LowerSetTable:
    """The table of a family of lower sets.

    Args:
        problem: Nodes, costs and edges.
        family: Lower sets as bit masks, ascending in size, ∅ first and V last, with all of the pruned family.
        is_complete: Whether these are all lower sets. Steps that are no better than two shorter ones by way of
            another member of the family are left out.
    """
    count = len(problem.times)
    num_words = max(1, -(-count // 64))
    words = _words(family, num_words)
    inside = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=max(1, count)).astype(bool)
    inside = np.asfortranarray(inside[:, :count])
    boundary, readers, siblings = (np.zeros_like(inside) for _ in range(3))
    for v, w in problem.edges:
        crossing = inside[:, v] & ~inside[:, w]
        boundary[:, v] |= crossing
        readers[:, w] |= crossing
    for v, w in problem.edges:
        siblings[:, v] |= readers[:, w] & ~inside[:, v]
    units, unit = _in_units(problem.memories)
    times = np.array(problem.times, dtype=np.float64)
    memory = inside @ units
    _, after = masks(count, problem.edges)
    depends = ancestors(count, problem.edges)
    leaking = [sum(1 << v for v in members(depends[b]) if after[v] & ~depends[b]) for b in range(count)]
    arcs = list_arcs(
        Family(
            words,
            _packed(boundary, num_words),
            *_listed(boundary),
            inside @ times,
            times,
            units,
            _words(depends, num_words),
            _words(leaking, num_words),
            is_complete,
        )
    )
    return LowerSetTable(tuple(family), memory, readers @ units + siblings @ units, arcs, unit, float(times.sum()))


def _in_units(memories: Sequence[float]) -> tuple[Floats, Fraction]:
    """Memories rounded up to whole units, as floats, with the unit; no rounding where all are integers."""
    exact = [Fraction(m) for m in memories]
    total = sum(exact, Fraction(0))
    if all(m.denominator == 1 for m in exact) and 4 * total < _EXACT:
        return np.array([float(m) for m in exact], dtype=np.float64), Fraction(1)
    unit = Fraction(1)
    while 4 * (total / unit + len(exact)) < _EXACT:
        unit /= 2
    while 4 * (total / unit + len(exact)) >= _EXACT:
        unit *= 2
    return np.array([float(-floor(-m / unit)) for m in exact], dtype=np.float64), unit


def _words(sets: Sequence[int], num_words: int) -> Words:
    data = b"".join(mask.to_bytes(8 * num_words, "little") for mask in sets)
    return np.frombuffer(data, dtype=np.uint64).reshape(len(sets), num_words)


def _packed(inside: NDArray[np.bool_], num_words: int) -> Words:
    packed = np.zeros((len(inside), 8 * num_words), dtype=np.uint8)
    bits = np.packbits(inside, axis=1, bitorder="little")
    packed[:, : bits.shape[1]] = bits
    return packed.view(np.uint64)


def _listed(inside: NDArray[np.bool_]) -> tuple[Small, Ints]:
    """The members of each row one after the other, and where each row begins."""
    starts = np.concatenate([[0], np.cumsum(inside.sum(axis=1))])
    return np.nonzero(inside)[1].astype(np.int32), starts
