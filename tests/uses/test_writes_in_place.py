"""Forwards that write into their own activations, by their own sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from changing_steps import BATCH, WIDTH, Halves, Outcome, outcome_of
from torch import Tensor, nn


class Sized(Halves):
    """Batches of another size in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def batch(self, k: int) -> tuple[Any, ...]:
        return (torch.randn(BATCH - 8 * (k % 3), WIDTH, generator=torch.Generator().manual_seed(k)),)


class MaskExpanded(Sized):
    """DeBERTa's convolution."""

    def between(self, h: Tensor) -> Tensor:
        y = self.inner(h).t().contiguous()
        y.masked_fill_((h.detach().mean(1) > 0.5).expand(y.size()), 0)
        return y.t().tanh()


class ExpandedByShape(Sized):
    def between(self, h: Tensor) -> Tensor:
        y = self.inner(h)
        y.add_(h.mean(0).expand(y.shape))
        return y.tanh()


class DrawnBySize(Sized):
    def between(self, h: Tensor) -> Tensor:
        y = self.inner(h)
        y.mul_(torch.rand(y.size()))
        return y.tanh() * torch.rand(y.size())


class SizeReadTwice(Sized):
    """The size is read by what lies between producer and write, and by what comes later."""

    def between(self, h: Tensor) -> Tensor:
        y = self.inner(h)
        size = y.size()
        y.add_(torch.ones(size) / size.numel())
        return y.tanh() * torch.ones(size).cumsum(0)


class SizeOfBoth(Sized):
    """One size more comes from outside of what is written."""

    def between(self, h: Tensor) -> Tensor:
        y = self.inner(h)
        other = torch.cat([h, h]).sigmoid()
        y.add_(torch.ones(y.size()) * torch.ones(other.size()).sum())
        return y.tanh()


CASES = [MaskExpanded, ExpandedByShape, DrawnBySize, SizeReadTwice, SizeOfBoth]


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_in_place_is_exact(case: type[Halves]) -> None:
    assert outcome_of(case) is Outcome.EXACT
