"""Forwards that draw into buffers: drawn once, by planning and recomputations never, between draws of their own."""

from __future__ import annotations

import pytest
import torch
from changing_steps import WIDTH, Halves, Outcome, outcome_of
from torch import Tensor, nn


class Noise(Halves):
    """Drawn for the next step, before what is dropped in this one is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.ones(WIDTH))

    def draw(self) -> None:
        self.noise.normal_()

    def between(self, h: Tensor) -> Tensor:
        h = h * self.noise.clone()
        self.draw()
        return nn.functional.dropout(h.exp(), 0.5)


class NoiseOfParts(Noise):
    """From what nobody else reads."""

    def draw(self) -> None:
        self.noise.copy_(torch.randn(WIDTH).abs() + torch.rand(WIDTH))


class NoiseInLists(Noise):
    def draw(self) -> None:
        torch._foreach_copy_([self.noise], [torch.rand(WIDTH)])


class NoiseAtTheEnd(Noise):
    def forward(self, x: Tensor) -> Tensor:
        y = self.tail(nn.functional.dropout(self.head(x) * self.noise.clone(), 0.5))
        self.draw()
        return y


class Redrawn(Noise):
    """A projection that is drawn again every few steps, as Performers do, from one half of a factorization."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.eye(WIDTH))
        self.register_buffer("calls", torch.tensor(0))

    @torch.no_grad()
    def redraw(self) -> None:
        q, _ = (part.to("cpu") for part in torch.linalg.qr(torch.randn(WIDTH, WIDTH)))
        self.matrix.copy_(torch.diag(torch.randn(WIDTH, WIDTH).norm(dim=1)) @ q.t())
        self.calls.zero_()

    def between(self, h: Tensor) -> Tensor:
        if self.calls >= 2:
            self.redraw()
        self.calls += 1
        return nn.functional.dropout(h @ self.matrix, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Noise, NoiseOfParts, NoiseInLists, NoiseAtTheEnd, Redrawn])
def test_what_a_forward_draws_is_drawn_once(case: type[Halves]) -> None:
    assert outcome_of(case) is Outcome.EXACT
