"""Arguments, modes of parts and switches of PyTorch change from step to step: every step sees the present ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from changing_steps import BATCH, WIDTH, Halves, Outcome, outcome_of
from torch import Tensor, nn


class ArgumentChangedInPlace(Halves):
    """The same list and dictionary in every step, with other contents."""

    options: tuple[list[float], dict[str, Any]] = ([1.0], {"power": 1})

    def batch(self, k: int) -> tuple[Any, ...]:
        self.options[0][:] = [1.0 + k] * (k + 1)
        self.options[1]["power"] = k + 1
        return (*super().batch(k), *self.options)

    def forward(self, x: Tensor, scales: list[float], options: dict[str, Any]) -> Tensor:
        h = self.head(x)
        for scale in scales:
            h = h * scale
        return self.tail(h ** options["power"])


class Arguments(Halves):
    def batch(self, k: int) -> tuple[Any, ...]:
        return (*super().batch(k), 1.0 + k, k, ("tanh", "sigmoid")[k % 2], bool(k % 2), None if k % 2 else k)

    def forward(self, x: Tensor, scale: float, count: int, name: str, is_on: bool, maybe: int | None) -> Tensor:
        h = getattr(torch, name)(self.head(x) * scale)
        for _ in range(count):
            h = h * 0.9
        h = h + 1 if is_on else h
        return self.tail(h if maybe is None else h * (maybe + 1))


class TensorAttribute(Halves):
    def change(self, k: int) -> None:
        self.weights = torch.full((WIDTH,), 1.0 + k)

    def between(self, h: Tensor) -> Tensor:
        return h * self.weights


class RequiresGradBranch(Halves):
    def change(self, k: int) -> None:
        self.tail[0].weight.requires_grad_(k % 2 == 0)

    def between(self, h: Tensor) -> Tensor:
        return h * 2 if self.tail[0].weight.requires_grad else h.tanh()


class ModeOfPart(Halves):
    """A part is put in eval mode now and then, as frozen batch norm is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def change(self, k: int) -> None:
        self.norm.train(k % 2 == 0)
        self.dropout.p = 0.1 * k

    def between(self, h: Tensor) -> Tensor:
        return self.dropout(self.norm(h))


class DefaultDtype(Halves):
    def change(self, k: int) -> None:
        torch.set_default_dtype((torch.float32, torch.float64)[k % 2])

    def between(self, h: Tensor) -> Tensor:
        return h * torch.ones(WIDTH).cumsum(0).sqrt().float()


class Autocast(Halves):
    """Autocast around the module is switched on and off."""

    def change(self, k: int) -> None:
        self.is_on = bool(k % 2)

    def step(self, *batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_on):
            loss = self(*batch).float().square().mean()
        loss.backward()
        return loss


class AutocastWithin(Halves):
    def change(self, k: int) -> None:
        self.is_on = bool(k % 2)

    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_on):
            return self.head(h).float()


class DeterminismFlag(Halves):
    """A global switch of PyTorch that a forward asks for."""

    def change(self, k: int) -> None:
        torch.set_float32_matmul_precision(("highest", "high")[k % 2])

    def between(self, h: Tensor) -> Tensor:
        return h * (2 if torch.get_float32_matmul_precision() == "high" else 1)


class InputSizes(Halves):
    def batch(self, k: int) -> tuple[Any, ...]:
        return (torch.randn(BATCH - 7 * k, WIDTH, generator=torch.Generator().manual_seed(k)),)

    def between(self, h: Tensor) -> Tensor:
        return h / h.shape[0] + len(h)


class SizesOfSlices(InputSizes):
    """A slice that was everything in the first step, and others whose places depend on the sizes."""

    def between(self, h: Tensor) -> Tensor:
        first, last = h[:40].sigmoid(), h[len(h) // 2 :].tanh()
        return (first * h[:40]).exp()[: len(last)] * last[: len(first)] * last.T.exp().T[: len(first)]

    def batch(self, k: int) -> tuple[Any, ...]:
        return super().batch((4, 3, 1, 0, 2)[k])


CASES = [
    ArgumentChangedInPlace, Arguments, TensorAttribute, RequiresGradBranch, ModeOfPart, DefaultDtype, Autocast,
    AutocastWithin, DeterminismFlag, InputSizes, SizesOfSlices,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_step_sees_the_present_arguments_and_settings(case: type[Halves]) -> None:
    assert outcome_of(case) is Outcome.EXACT
