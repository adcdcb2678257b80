"""Buffers that are written between a forward and its backward, which a plain backward does not need any more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from changing_steps import BATCH, WIDTH, Halves, Outcome, outcome_of
from torch import Tensor

STARTS_LATE = 2
"""The step from which on something is new."""


class Averages(Halves):
    """Divides by a moving average that its forward takes in; further forwards come before the backward."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.9).add_(h.detach().abs().mean(0), alpha=0.1)
        return self.divided(h)

    def divided(self, h: Tensor) -> Tensor:
        return (h / (self.scale + 1).expand(BATCH, WIDTH).exp()).sigmoid()

    def step(self, *batch: Any) -> Tensor:
        loss = self(*batch).square().mean()
        self.meanwhile(*batch)
        loss.backward()
        return loss

    def meanwhile(self, x: Tensor) -> None:
        with torch.no_grad():
            self(x + 1)


class TwoForwards(Averages):
    def step(self, *batch: Any) -> Tensor:
        loss = self(*batch).square().mean() + self(batch[0] + 1).mean()
        loss.backward()
        return loss


class OfALaterGraph(Averages):
    """What is read is written by the step, and by no forward: a graph that is new then copies it."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = "first"

    def change(self, k: int) -> None:
        self.kind = "first" if k < STARTS_LATE else f"from step {k}"

    def between(self, h: Tensor) -> Tensor:
        return self.divided(h * len(self.kind)) if self.kind != "first" else h.sigmoid()

    def meanwhile(self, x: Tensor) -> None:
        with torch.no_grad():
            self.scale.mul_(0.9)


class TwiceInALaterGraph(OfALaterGraph):
    """Of two calls only the first, whose backward comes last, is followed by a write."""

    def change(self, k: int) -> None:
        self.kind = "first" if k < STARTS_LATE else "later"

    def step(self, *batch: Any) -> Tensor:
        loss = self(*batch).square().mean()
        self.meanwhile(*batch)
        loss = loss + self(batch[0] + 1).mean()
        loss.backward()
        return loss


class ManyBehindABreak(Averages):
    """More of them than steps would be tried if each found one."""

    def __init__(self) -> None:
        super().__init__()
        for k in range(12):
            self.register_buffer(f"shift{k}", torch.full((WIDTH,), 0.1 * k))

    def between(self, h: Tensor) -> Tensor:
        for k in range(12):
            h = self.divided(h + self.get_buffer(f"shift{k}").expand(BATCH, WIDTH).exp())
        if h.sum().item() > 1e9:
            h = h / 2
        with torch.no_grad():
            for k in range(12):
                self.get_buffer(f"shift{k}").mul_(0.9)
        return h

    def meanwhile(self, x: Tensor) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("case", [Averages, TwoForwards, OfALaterGraph, TwiceInALaterGraph, ManyBehindABreak])
def test_what_is_written_between_is_exact(case: type[Halves]) -> None:
    assert outcome_of(case) is Outcome.EXACT
