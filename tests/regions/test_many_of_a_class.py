"""Modules of one class whose forward is several graphs: TorchDynamo keeps what it captures with code that all share."""

from __future__ import annotations

import copy
from inspect import signature

import pytest
import torch
from torch import Tensor, nn
from training_steps import assert_equal_traces, traces

from lightning_remat import rematerialize

_NUM_MODULES = 18
"""More than are captured of one code, where TorchDynamo counts those of all modules together, as that of torch 2.11."""


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(step for _ in range(3) for step in (nn.Linear(16, 16), nn.Tanh(), nn.Sigmoid())))

    def first(self, x: Tensor) -> Tensor:
        return self.layers(x) * 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum().item() > 1e9:
            x = x / 2
        return self.layers(x)


@pytest.mark.slow
@pytest.mark.skipif("isolate_recompiles" in signature(torch.compile).parameters, reason="TorchDynamo tells them apart")
@pytest.mark.filterwarnings("ignore:.*runs without rematerialization")
def test_each_runs_what_was_captured_of_it() -> None:
    x = torch.randn(256, 16)
    modules = [Divided() for _ in range(_NUM_MODULES)]
    plain = copy.deepcopy(modules)
    for module in modules:
        rematerialize(module, x, memory_budget="90%", planner="periodic")
    for ours, theirs in zip(modules, plain, strict=True):
        assert_equal_traces(traces(theirs, [x, x]), traces(ours, [x, x]))
