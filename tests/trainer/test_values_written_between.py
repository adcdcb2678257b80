"""Training steps that write in place, between a forward and its backward, what a plain backward needs no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from same_runs import WIDTH, Deep, assert_same_run, deep, remat
from torch import Tensor, nn

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]


class Scaled(nn.Module):
    """Layers behind two operations that do not save what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = deep(depth=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers((x * 2 + 1).sigmoid())


class WritesItsBatch(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = Scaled()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        batch[0].zero_()
        return loss


class WritesItsBatchLater(WritesItsBatch):
    """In steps that are compared, and not in the one that is planned."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        if self.global_step:
            batch[0].zero_()
        return loss


class MovingAverage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = deep(depth=3), deep(depth=3)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        with torch.no_grad():
            self.scale.mul_(0.9).add_(h.detach().abs().mean(0), alpha=0.1)
        return self.second((h / (self.scale + 1)).sigmoid())


class RetainsItsGraph(Deep):
    """Two backwards of one graph, after a forward for targets that moves the average, too."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net: Any = MovingAverage()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        out = self.net(batch[0])
        with torch.no_grad():
            target = self.net(batch[0] + 1)
        loss = (out - target).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss * 0.5)
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("case", [WritesItsBatch, WritesItsBatchLater, RetainsItsGraph])
def test_the_run_is_the_same_and_planned(tmp_path: Path, case: type[Deep]) -> None:
    assert_same_run(tmp_path, case, callback=remat(memory_budget="85%", on_infeasible="minimum"))
