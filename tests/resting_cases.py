"""Modules in which outputs rest, see `execution.resting`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from rewriting import rewrite
from torch import Tensor, nn

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


def rested(module: nn.Module) -> int:
    """How many operations need no hooks where what they read rests."""
    return sum(len(p.variants[-1].rests.operations) for p in programs_in(module))
