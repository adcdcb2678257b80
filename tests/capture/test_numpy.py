"""What a forward computes with numpy, or draws from it, is numpy's: torch has other bits for it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training_steps import assert_equal_traces, traces

from lightning_remat import rematerialize

WIDTH = 16


def stack() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Sigmoid())))


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.tail = stack(), stack()

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.between(self.head(x)))

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError


class Spaced(Halves):
    def between(self, h: Tensor) -> Tensor:
        return h * torch.from_numpy(np.linspace(0.1, 1.7, WIDTH))


class Averaged(Halves):
    def between(self, h: Tensor) -> Tensor:
        return h * float(np.sin(np.arange(1000) / 3.0).mean())


class Activated(Halves):
    def between(self, h: Tensor) -> Tensor:
        return h * torch.from_numpy(np.tanh(h.detach().numpy()).mean(0))


class Drawn(Halves):
    def between(self, h: Tensor) -> Tensor:
        return h * torch.from_numpy(np.random.rand(WIDTH))  # noqa: NPY002


class Masked(Halves):
    """As wav2vec2 hides spans of time."""

    def between(self, h: Tensor) -> Tensor:
        mask = np.zeros(len(h), dtype=bool)
        mask[np.random.choice(np.arange(len(h)), len(h) // 3, replace=False)] = True  # noqa: NPY002
        return torch.where(torch.from_numpy(mask)[:, None], h, 0.0)


class Scaled(Halves):
    def between(self, h: Tensor) -> Tensor:
        return h.reshape(-1, int(np.prod(h.shape[1:]))) / np.sqrt(h.shape[-1]) * np.exp(0.3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Spaced, Averaged, Activated, Drawn, Masked, Scaled])
def test_numpy_computes_and_draws_itself(kind: type[Halves]) -> None:
    torch.manual_seed(0)
    plain = kind().double()
    ours = copy.deepcopy(plain)
    x = torch.randn(256, WIDTH, dtype=torch.float64)
    plan = rematerialize(ours, x, memory_budget="95%", planner="periodic")
    assert plan.num_recomputed
    assert plan.rung == ("traced" if kind is Scaled else "regions")
    found: list[dict[str, Tensor]] = []
    for module in (plain, ours):
        np.random.seed(5)  # noqa: NPY002
        found.append({**traces(module, [x, x]), "next": torch.tensor(np.random.rand())})  # noqa: NPY002
    assert_equal_traces(*found)
