"""What TorchDynamo would compute otherwise than Python and PyTorch do: bits and gradients are the plain ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from changing_steps import WIDTH, Halves, Outcome, outcome_of
from torch import Tensor, nn

from lightning_remat import rematerialize


class Memory(Halves):
    """A buffer that its forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.full((WIDTH,), 0.3))

    def between(self, h: Tensor) -> Tensor:
        return h + self.memory


class MovingAverage(Memory):
    def between(self, h: Tensor) -> Tensor:
        self.memory.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return super().between(h)


class WrittenByQuotient(Memory):
    def between(self, h: Tensor) -> Tensor:
        self.memory.addcdiv_(h.detach().mean(0), h.detach().square().sum(0), value=0.3)
        return super().between(h)


class WrittenByProduct(Memory):
    def between(self, h: Tensor) -> Tensor:
        self.memory.addcmul_(h.detach().mean(0), h.detach().sum(0), value=0.3)
        return super().between(h)


class WrittenInLists(Memory):
    """As averages of weights are."""

    def between(self, h: Tensor) -> Tensor:
        torch._foreach_lerp_([self.memory], [h.detach().mean(0)], 0.3)
        return super().between(h)


class WrittenInListsUnread(Memory):
    def between(self, h: Tensor) -> Tensor:
        torch._foreach_mul_([self.memory], 0.9)
        torch._foreach_add_([self.memory], [h.detach().mean(0)], alpha=0.1)
        return h


class Quotient(Halves):
    def between(self, h: Tensor) -> Tensor:
        return torch.addcdiv(h, h.exp(), h + 3, value=0.1)


class Branches(Halves):
    """Parts of which a step chooses one: what was not chosen gets no gradient, not zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class TheLarger(Branches):
    def between(self, h: Tensor) -> Tensor:
        return h * max(self.a(h).mean(), self.b(h).mean())


class TheLeast(Branches):
    def between(self, h: Tensor) -> Tensor:
        return h * min([self.a(h).mean(), h.mean(), self.b(h).mean()])


class Alike(Branches):
    """Of two that are equal the first one."""

    def between(self, h: Tensor) -> Tensor:
        return h * max(self.a(h).mean() * 0, self.b(h).mean() * 0) + h


class Hinge(Branches):
    def between(self, h: Tensor) -> Tensor:
        return h + max(0.0, self.a(h).mean() - 5) + max(self.b(h).mean() + 5, 0.0)


class CountsForAll(Halves):
    """Of all instances, and reads it as its own."""

    calls = 0

    def between(self, h: Tensor) -> Tensor:
        type(self).calls += 1
        return h * self.calls

    def change(self, k: int) -> None:
        if not k:
            type(self).calls = 0


class Generated(Halves):
    """Multiplies by what a generator yields."""

    def between(self, h: Tensor) -> Tensor:
        return h * next(self.numbers)

    numbers: Iterator[int]


WRITTEN = [MovingAverage, WrittenByQuotient, WrittenByProduct, WrittenInLists, WrittenInListsUnread, Quotient]
OF_CLASSES = [CountsForAll]
CHOSEN = [TheLarger, TheLeast, Alike, Hinge]


@pytest.mark.sampled
@pytest.mark.parametrize("case", [*WRITTEN, *OF_CLASSES, *CHOSEN])
def test_bits_and_gradients_are_the_plain_ones(case: type[Halves]) -> None:
    assert outcome_of(case) is Outcome.EXACT


@pytest.mark.slow
def test_a_generator_goes_on_where_it_was() -> None:
    module, x = Generated(), torch.randn(64, WIDTH)
    module.numbers = (n for n in (1, 2, 4))
    assert rematerialize(module, x, memory_budget="100%", planner="periodic").rung == "regions"
    outputs = [module(x) for _ in range(3)]
    with torch.no_grad():
        wanted = [module.tail(module.head(x) * k) for k in (1, 2, 4)]
    assert all(map(torch.equal, outputs, wanted))
