"""A sequence of plain layers with one among them that cannot be captured is planned on both sides of it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_steps import assert_equal_traces, step_peak, traces

from lightning_remat import rematerialize

X = torch.randn(64, 16)


class Logs(nn.Module):
    """Looks at values to say something, which divides the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.largest.append(x.detach().abs().max().item())
        return x * 2


def layers() -> list[nn.Module]:
    return [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Sigmoid(), nn.Tanh(), nn.Dropout(0.2))]


class Block(nn.Sequential):
    """With a forward that is inherited."""


def named() -> nn.Sequential:
    parts = [*layers(), Logs(), *layers()]
    return Block(OrderedDict((f"part_{k}", part) for k, part in enumerate(parts)))


def plain_sequence() -> nn.Sequential:
    return nn.Sequential(*layers(), Logs(), *layers())


def append(module: nn.Sequential) -> None:
    torch.manual_seed(3)
    module.append(nn.Linear(16, 16))


def remove(module: nn.Sequential) -> None:
    del module[0]


def exchange(module: nn.Sequential) -> None:
    module[12] = nn.Tanh()  # nothing is in the way any more


def hook(module: nn.Sequential) -> None:
    module[12].register_forward_hook(lambda _module, _args, output: output + 1)


@pytest.mark.slow
@pytest.mark.parametrize("make", [plain_sequence, named])
@pytest.mark.parametrize("change", [append, remove, exchange, hook])
def test_a_sequence_is_divided_and_may_change(make: Callable[[], Any], change: Callable[[Any], None]) -> None:
    torch.compiler.reset()  # torch 2.11 counts captures of all modules of a class together
    module = make()
    plain = copy.deepcopy(module)
    plan = rematerialize(module, X, memory_budget="85%", planner="periodic")
    assert plan.rung == "regions"
    assert plan.num_recomputed
    assert_equal_traces(traces(plain, [X, X[:5]]), traces(module, [X, X[:5]]))
    assert module[12].largest == plain[12].largest
    assert step_peak(module, X) < step_peak(plain, X)
    change(module), change(plain)
    assert_equal_traces(traces(plain, [X, X[:5]]), traces(module, [X, X[:5]]))
