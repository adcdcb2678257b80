"""What is written with gradients into what comes into a graph.

A learned token into the batch, or after a break, as models do that are trained on what is masked, wav2vec's and
HuBERT's among them: no plan holds it. A memory that is a buffer, which asks for none before: gradients flow through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from changing_steps import BATCH, WIDTH, Halves, Outcome, outcome_of
from torch import Tensor, nn

from lightning_remat import TraceError, rematerialize, trace
from lightning_remat.module_state.batches import record_values


class Token(Halves):
    """Written into the batch, which asks for no gradients before."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        x[::2] = self.token
        return super().forward(x)


class TokenCopied(Token):
    def forward(self, x: Tensor) -> Any:
        x[: BATCH // 2].copy_(self.token)
        return Halves.forward(self, x)


class TokenAfterABreak(Token):
    """Into the result of the graph before, from the third step on."""

    masks = False

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(WIDTH, WIDTH)

    def change(self, k: int) -> None:
        self.masks = k >= 2

    def forward(self, x: Tensor) -> Any:
        h = self.middle(self.head(x))
        torch._dynamo.graph_break()
        if self.masks:
            h[::2] = self.token.to(torch.float32)
        return self.tail(h.sigmoid())


class Memory(Halves):
    """Whoever trains it cuts it from the step before."""

    memory: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.ones(BATCH, WIDTH))

    def change(self, k: int) -> None:
        self.memory.detach_()

    def between(self, h: Tensor) -> Tensor:
        self.memory.mul_(h)
        return (self.memory * h).sin()


class MemoryWrittenInPart(Memory):
    def between(self, h: Tensor) -> Tensor:
        self.memory[::2] = h[::2].sigmoid()
        return (self.memory * h).sin()


class MemoryReadBefore(Memory):
    def between(self, h: Tensor) -> Tensor:
        read = (self.memory * 2).cos().tanh()
        self.memory[1:].mul_(h[1:])
        return (read * h).sin() + self.memory


class MemoryReadBetween(Memory):
    def between(self, h: Tensor) -> Tensor:
        self.memory.copy_(h.sin())
        read = (self.memory * 2).cos().tanh()
        self.memory[: BATCH // 2] = read[BATCH // 2 :].sigmoid()
        return (self.memory + read).sin()


class MemoryWithinAnOperation(Memory):
    """What is written in place while others read it is one operation, which is profiled several times."""

    def between(self, h: Tensor) -> Tensor:
        kept = h.sin()
        self.memory.copy_(h.cos())
        with torch.no_grad():
            self.memory.lerp_(h, 0.1)
        read = h + self.memory.cos()
        kept.relu_()
        return read * 2 + kept


class WrittenAfterwards(Halves):
    """An activation, by a later graph, when one before has read it."""

    planner = "auto"

    def forward(self, x: Tensor) -> Any:
        h = self.head(x) + 1
        torch._dynamo.graph_break()
        read = self.tail(h.relu().sin().tanh())
        torch._dynamo.graph_break()
        h *= 2
        return self.tail(read + h)


class MemoryWrittenAfterwards(Memory):
    def forward(self, x: Tensor) -> Any:
        self.memory.mul_(self.head(x))
        read = self.tail(torch.where(self.memory > 0.5, x.sin(), x.cos()))
        torch._dynamo.graph_break()
        self.memory.mul_(read)
        return self.tail(self.memory + 1)


class SizesOfWhatIsWrittenAfterwards(Halves):
    """Other sizes are other graphs, of which the step that was tried tells, too."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(WIDTH))

    def batch(self, k: int) -> tuple[Any, ...]:
        return (torch.randn(BATCH - 8 * (k % 3), WIDTH, generator=torch.Generator().manual_seed(k)),)

    def forward(self, x: Tensor) -> Any:
        h = self.head(x) + 1
        read = self.tail((h + self.state.cos().sin()).tanh())
        torch._dynamo.graph_break()
        with torch.no_grad():
            self.state.lerp_(read.mean(0), 0.5)
        return self.tail(read + h)


@pytest.mark.slow
@pytest.mark.parametrize("case", [WrittenAfterwards, MemoryWrittenAfterwards, SizesOfWhatIsWrittenAfterwards])
def test_a_later_graph_writes_what_one_before_has_read(case: type[Halves]) -> None:
    assert outcome_of(case) is Outcome.EXACT


@pytest.mark.slow
@pytest.mark.parametrize("case", [Token, TokenCopied])
def test_the_rest_is_rewritten(case: type[Halves]) -> None:
    assert outcome_of(case) is Outcome.EXACT


@pytest.mark.parametrize(
    "case", [Memory, MemoryWrittenInPart, MemoryReadBefore, MemoryReadBetween, MemoryWithinAnOperation]
)
def test_gradients_flow_through_a_buffer(case: type[Halves]) -> None:
    assert outcome_of(case) is Outcome.EXACT


@pytest.mark.slow
def test_a_piece_that_comes_to_write_runs_plain() -> None:
    assert outcome_of(TokenAfterABreak) is Outcome.PARTLY


@pytest.mark.parametrize("case", [Token, TokenCopied])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_it_is_no_single_graph(case: type[Halves], requires_grad: bool) -> None:
    x = torch.randn(BATCH, WIDTH, requires_grad=requires_grad) * 1
    with pytest.raises(TraceError, match=r"writes in place into an input, with gradients.*Remedy") as error:
        trace(case(), x)
    assert error.value.where is not None
    assert error.value.where.startswith(f"{__file__}:")


@pytest.mark.slow
def test_a_batch_into_which_it_was_tried_asks_for_no_gradients() -> None:
    x = torch.randn(BATCH, WIDTH)
    before = x.clone()
    rematerialize(Token(), x, memory_budget="99%")
    assert not x.requires_grad
    assert torch.equal(x, before)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x[1:], lambda x: x[1:].flip(0).t()])
def test_values_and_the_lack_of_a_history_are_put_back(make: Callable[[Tensor], Tensor]) -> None:
    x, token = make(torch.zeros(3, 2)), torch.ones((), requires_grad=True)
    put_back = record_values([x])
    x[0] = token
    assert x.requires_grad
    put_back()
    assert not x.requires_grad
    assert x.grad_fn is None
    assert not x.any()
