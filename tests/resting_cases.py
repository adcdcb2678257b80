"""Modules in which outputs rest, see `execution.resting`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from rewriting import recomputing_copy, rewrite
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from uses import same

from lightning_remat import profile, trace
from lightning_remat.execution.resting_storages import RestingResult
from lightning_remat.execution.rewriter import programs_in


class Between(nn.Module):
    """A function of three layers and an input."""

    def __init__(self, does: Callable[[Any, Tensor], Any], width: int = 6) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        self.does = does

    def forward(self, x: Tensor) -> Any:
        return self.does(self, x)


class Before(Between):
    """What is to be tested, and layers after it that need more memory."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(does)
        self.after = nn.Sequential(nn.Linear(6, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        made = self.does(self, x)
        return self.after(made.reshape(-1, 6) if made.dim() else made.expand(6)).sum()


def resting_copy(module: nn.Module, x: Tensor) -> nn.Module:
    """A copy that recomputes all but the outputs of layers."""
    ours = copy.deepcopy(module)
    graph = profile(trace(ours, x), x, repeats=1)
    layers = ("linear", "conv2d", "lstm_cell")
    rewrite(ours, [n for n, node in enumerate(graph.nodes) if node.kind in layers and n % 2 == 0], x)
    return ours


def rested_tapes(module: nn.Module) -> int:
    """How many operations' tapes rest."""
    return sum(len(p.variants[-1].rests.tapes) for p in programs_in(module))


def rested_results(module: nn.Module) -> int:
    """How many outputs rest that their own operations have saved."""
    tensors = (t for p in programs_in(module) for t in p.variants[-1].rests.tensors.values())
    return sum(isinstance(t, RestingResult) for t in tensors)


def assert_right_after_a_failed_fill(module: nn.Module, x: Tensor, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that failed while something of this kind was filled leaves the next one right, and itself repeatable."""
    ours = recomputing_copy(module, x)
    for m in (module, module, ours, ours):
        m.zero_grad()
        m(x).backward()
    assert rested(ours)
    loss = ours(x)

    def fails(*args: Any) -> None:
        raise MemoryError("full")

    with monkeypatch.context() as patched:
        patched.setattr(kind, "fill", fails)
        # Under a mode, as what is there almost always is filled by lines of the compiled function.
        with FlopCounterMode(display=False), pytest.raises(MemoryError, match="full"):
            loss.backward(retain_graph=True)
    for backward in (loss.backward, lambda: ours(x).backward()):  # that begins anew
        ours.zero_grad()
        backward()
        for name, p in module.named_parameters():
            assert p.grad is None or same(p.grad, ours.get_parameter(name).grad)


def rested(module: nn.Module) -> int:
    """How many operations need no hooks where what they read rests."""
    return sum(len(p.variants[-1].rests.operations) for p in programs_in(module))
