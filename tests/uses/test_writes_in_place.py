"""Forwards that write into their own activations: by their own sizes, as running sums, among gradients that add up."""

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


class PartOfAView(Sized):
    """Of such a view PyTorch makes the node late, and crashes at hooks before."""

    def between(self, h: Tensor) -> Tensor:
        y = self.inner(h).t().t()
        y[::2] = h[::2].tanh()
        return y.cos()


class SizeOfBoth(Sized):
    """One size more comes from outside of what is written."""

    def between(self, h: Tensor) -> Tensor:
        y = self.inner(h)
        other = torch.cat([h, h]).sigmoid()
        y.add_(torch.ones(y.size()) * torch.ones(other.size()).sum())
        return y.tanh()


class RunningSum(Sized):
    """A logit to which a linear and a deep part are added, as models of click rates have it."""

    def forward(self, x: Tensor) -> Tensor:
        logit = x.new_zeros(len(x), WIDTH)
        logit += self.inner(x)
        logit += self.tail(self.head(x))
        return logit.sigmoid()


class SumOfNoGradient(Sized):
    """What is made without gradients gets three of them, once something with gradients was added to it."""

    def between(self, h: Tensor) -> Tensor:
        total = torch.zeros_like(h)
        total.add_(self.inner(h))
        first = total * 0.37
        second, third = (total * 1.7).tanh(), total.sin()
        first += second
        return first + third


class PartsSetInPlace(Sized):
    def between(self, h: Tensor) -> Tensor:
        total = torch.zeros_like(h)
        total[:, 1:] = self.inner(h)[:, 1:]
        first = total * 0.37
        second, third = (total * 1.7).tanh(), total.sin()
        first += second
        return first + third


class TwoFromOneReader(Sized):
    """`y * y` contributes two gradients to `y`."""

    def between(self, h: Tensor) -> Tensor:
        y = self.inner(h)
        square = y * y
        square += (y * 1.7).tanh()
        return square


class ReturnedToo(Sized):
    """What the caller reads gets a gradient from there too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(self.head(x))
        scaled = y * 0.37
        scaled += (y * 1.7).tanh()
        return y, self.tail(scaled)

    def step(self, *batch: Any) -> Tensor:
        y, z = self(*batch)
        loss = y.sin().square().mean() + z.square().mean()
        loss.backward()
        return loss


class ReadByTwoGraphs(Sized):
    """What comes in gets a gradient from another graph too."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.head(x))
        torch._dynamo.graph_break()
        scaled = y * 0.37
        scaled += (y * 1.7).tanh()
        z = self.tail(scaled)
        torch._dynamo.graph_break()
        return self.tail(z) + y.sin()


CASES = [
    MaskExpanded, ExpandedByShape, DrawnBySize, SizeReadTwice, PartOfAView, SizeOfBoth,
    RunningSum, SumOfNoGradient, PartsSetInPlace, TwoFromOneReader, ReturnedToo, ReadByTwoGraphs,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_written_in_place_is_exact(case: type[Halves]) -> None:
    assert outcome_of(case) is Outcome.EXACT
