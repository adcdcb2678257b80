"""Steps that call a module, and what lies inside it by itself: an encoder beside the whole, a loss with parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from remat_runs import run
from same_runs import BATCH, WIDTH, Deep, assert_same_run, deep, remat
from torch import Tensor, nn

from lightning_remat import Rematerialization, find_batch_size, restore

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]


class Loss(nn.Module):
    """A loss that learns, and is several operations."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (self.project(x) * self.scale).square().mean()


class Encoding(Deep):
    """An encoder and a head: the step calls both together, and the encoder alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("ramp", torch.linspace(-1, 1, BATCH * WIDTH) / BATCH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x)) * 2

    def loss_of(self, x: Tensor) -> Tensor:
        """Its backward makes the gradient of `x`, and nothing else: what losses make besides is no region's."""
        return torch.dot(x.flatten(), self.ramp)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        return self.loss_of(self(x)) + self.loss_of(self.net(x)) - self.loss_of(self.net(x.flip(0)))


class Divided(Encoding):
    """Its forward is no single graph."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        if h.sum().item() > 1e9:
            h = h / 2
        return self.head(h) * 2


class Deeper(Divided):
    """What is called alone lies two levels down; its neighbours are parts of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(deep(depth=3), deep(depth=3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(self(batch[0])) + self.loss_of(self.net[0](batch[0]))


class OneLayer(Encoding):
    """What is called alone is a single layer, for which nothing is divided."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(self(batch[0])) + self.loss_of(self.head[0](batch[0]))


class LearnedLoss(Encoding):
    """What is called alone lies in the module and is not called by it: both are served."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = Loss()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self(batch[0]))


class DividedLearnedLoss(LearnedLoss, Divided):
    pass


class CalledFromThenOn(LearnedLoss):
    """The module begins to call it while it trains."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h + self.loss(h) if self.trainer.global_step >= 2 else h


class CalledNoMore(LearnedLoss):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h + self.loss(h) if self.trainer.global_step < 2 else h


CASES: dict[type[Encoding], set[str]] = {
    Encoding: {"net", "head"},
    Divided: {"net", "head"},
    Deeper: {"net.0", "net.1", "head"},
    OneLayer: {""},
    LearnedLoss: {"", "loss"},
    DividedLearnedLoss: {"[0]", "[1]", "loss"},
    CalledFromThenOn: {"", "loss"},
    CalledNoMore: {"net", "head", "loss"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_run_is_the_same_and_all_is_planned(tmp_path: Path, case: type[Encoding]) -> None:
    result = assert_same_run(tmp_path, case, callback=remat(planner="auto", memory_budget="85%"), max_steps=6).result
    assert result is not None
    assert {*result.step.keys} == CASES[case]
    assert result.measured_peak_bytes is not None
    assert result.measured_peak_bytes <= result.budget_bytes
    assert result.measured_peak_bytes - result.predicted_peak_bytes < 16  # bytes: the loss, a number, is no region's


def test_modules_that_are_named_must_not_lie_in_each_other(tmp_path: Path) -> None:
    callback = Rematerialization(memory_budget="85%", batch_size="keep", modules=["net", "net.0"])
    with pytest.raises(ValueError, match=r"modules names 'net' and 'net\.0', which lies inside it: name one"):
        run(tmp_path, Deep(), callback)


@pytest.mark.slow
def test_without_a_trainer() -> None:
    module = Encoding()
    batch = (torch.randn(BATCH, WIDTH),)
    result = find_batch_size(
        module, batch, lambda b: module.training_step(b, 0), torch.optim.SGD(module.parameters(), 0.1),
        memory_budget="85%", batch_size="keep",
    )  # fmt: skip
    assert {*result.step.keys} == {"net", "head"}
    restore(module)
