"""TorchDynamo leaves the hooks of a rewritten module alone where code differentiates within its forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_steps import assert_equal_traces, traces

from lightning_remat import rematerialize
from lightning_remat.capture import dynamo
from lightning_remat.capture.dynamo import CapturedGraph


class Adversarial(nn.Module):
    """Trains on what the sign of its own gradient makes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(f for _ in range(5) for f in (nn.Linear(32, 32), nn.Tanh(), nn.GELU())))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.net(x).square().mean(), x)
        return self.net((x + 0.1 * gradient.sign()).detach())


@pytest.mark.slow
def test_only_the_forward_is_captured_where_it_differentiates(monkeypatch: pytest.MonkeyPatch) -> None:
    def noting(self: CapturedGraph, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.code is not None:  # not of a forward that is one graph
            captured.add(self.code.co_filename)

    original, captured = CapturedGraph.__init__, set[str]()
    monkeypatch.setattr(CapturedGraph, "__init__", noting)
    plain, x = Adversarial(), torch.randn(256, 32)
    ours = copy.deepcopy(plain)
    assert rematerialize(ours, x, memory_budget="80%").num_recomputed
    assert_equal_traces(traces(plain, [x, x, x]), traces(ours, [x, x, x]))
    # Since torch 2.15 TorchDynamo leaves such a forward alone, and the submodule is captured by an entry of ours.
    assert captured == {dynamo.__file__ if torch.__version__ >= "2.15" else __file__}
