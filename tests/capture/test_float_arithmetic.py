"""Python's arithmetic with sizes and a module's numbers is done in its order, whatever a formula would simplify."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from changing_steps import WIDTH, Halves, Outcome, outcome_of
from torch import Tensor


class Sized(Halves):
    """Batches of changing sizes."""

    room = 4.0

    def batch(self, k: int) -> tuple[Any, ...]:
        return (torch.randn((50, 50, 60, 10, 30)[k], WIDTH, generator=torch.Generator().manual_seed(k)),)


class Compared(Sized):
    def between(self, h: Tensor) -> Tensor:
        size = h.shape[0]
        return h * (2 if size * 0.1 * 3 == size * 0.3 else 3) * (5 if size * 1.1 * 1.1 == size * (1.1 * 1.1) else 7)


class Repeated(Sized):
    """The number of rounds comes from a size."""

    def between(self, h: Tensor) -> Tensor:
        for _ in range(math.ceil(h.shape[0] * 1.1 * 3) % 4):
            h = h.sin()
        return h


class Annealed(Halves):
    """A number that changes, and what is computed from it with all bits of a double."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.rate = 0.7

    def change(self, k: int) -> None:
        self.rate = 0.1 * (k + 1)

    def batch(self, k: int) -> tuple[Any, ...]:
        return (super().batch(k)[0].double(),)


class ThereAndBack(Annealed):
    def between(self, h: Tensor) -> Tensor:
        return h * ((self.rate + 0.2) - 0.2)


class Thrice(Annealed):
    def between(self, h: Tensor) -> Tensor:
        return h * (self.rate * 3 * 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Compared, Repeated, ThereAndBack, Thrice])
def test_numbers_are_pythons(case: type[Halves]) -> None:
    assert outcome_of(case) is Outcome.EXACT


class Complement(Annealed):
    """One operation of each number is captured for all its values."""

    def between(self, h: Tensor) -> Tensor:
        return h * self.rate + h.sin() * (1 - self.rate)


@pytest.mark.slow
def test_one_operation_needs_no_second_capture() -> None:
    assert outcome_of(Complement, steps=12) is Outcome.EXACT
