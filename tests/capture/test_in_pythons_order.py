"""What a forward walks through in an order: sums over sets and ordered dictionaries have the bits of the plain run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import pytest
from changing_steps import Halves, Outcome, outcome_of
from torch import Tensor

from lightning_remat import trace


def folded(h: Tensor, numbers: Iterable[int]) -> Tensor:
    """Depends on the order of the numbers."""
    for k in numbers:
        h = (h * k + k).sin()
    return h


class OfAList(Halves):
    def between(self, h: Tensor) -> Tensor:
        return folded(h, set([9, 1, 33, 4, 100, 64]))  # noqa: C405 - a display would be a constant


class Frozen(Halves):
    def between(self, h: Tensor) -> Tensor:
        return folded(h, frozenset([9, 1, 33, 4, 100, 64]))


class OfTwo(Halves):
    def between(self, h: Tensor) -> Tensor:
        return folded(h, {9, 1, 33} | {64, 100, 2})


class OfKeys(Halves):
    def between(self, h: Tensor) -> Tensor:
        return folded(h, dict.fromkeys([9, 1, 33, 4]).keys() & dict.fromkeys([33, 9, 1]).keys())


class Comprehended(Halves):
    def between(self, h: Tensor) -> Tensor:
        return folded(h, {k * k % 37 for k in range(9)})


class Emptied(Halves):
    def between(self, h: Tensor) -> Tensor:
        numbers = set([9, 1, 33, 4, 100, 64])  # noqa: C405
        while numbers:
            h = folded(h, [numbers.pop()])
        return h


class Grown(Halves):
    """Holds a set that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = {5}

    def between(self, h: Tensor) -> Tensor:
        self.numbers.discard(5)
        self.numbers.add(len(self.numbers) * 37 % 11 + 9)
        self.numbers |= {1, 33}
        return folded(h, self.numbers)


class Reordered(Halves):
    """As a cache does that forgets what was not used for the longest time."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: Any = OrderedDict(a=1, b=2, c=3)

    def between(self, h: Tensor) -> Tensor:
        self.numbers.move_to_end(next(iter(self.numbers)))
        return folded(h, self.numbers.values())


@pytest.mark.slow
@pytest.mark.parametrize("case", [OfAList, Frozen, OfTwo, OfKeys, Comprehended, Emptied, Grown, Reordered])
def test_bits_are_those_of_the_plain_run(case: type[Halves]) -> None:
    assert outcome_of(case) is Outcome.EXACT


class Counted(Halves):
    """Sets in which nothing is walked, and one item that has no order."""

    def between(self, h: Tensor) -> Tensor:
        seen: set[int] = set()
        for k in (1, 2, 1, 3):
            if k not in seen:
                seen.add(k)
                h = h * k
        return folded(h, {len(seen)})


def test_a_set_that_is_only_asked_is_captured() -> None:
    module = Counted()
    assert trace(module, *module.batch(0)).rung == "traced"
