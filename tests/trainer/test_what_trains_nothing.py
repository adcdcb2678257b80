"""Calls of a step that train nothing: frozen networks are planned, modules without parameters are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from remat_runs import run
from same_runs import Deep, assert_same_run, deep, remat
from torch import Tensor, nn
from torch.nn import functional

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]


class Perceptual(Deep):
    """Its loss compares by the eyes of a frozen network."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Sequential(*(deep() for _ in range(4))).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        target = self.judge(x).detach()
        loss = (self.judge(self.net(x)) - target).square().mean()
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters())


class InEval(Perceptual):
    """The frozen network neither drops nor counts."""

    def __init__(self) -> None:
        super().__init__()
        self.judge.eval()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Perceptual, InEval])
def test_a_frozen_network_is_planned_too(kind: type[Perceptual], tmp_path: Path) -> None:
    callback = assert_same_run(tmp_path, kind, callback=remat(memory_budget="65%"))
    assert callback.result is not None
    step = callback.result.step
    assert step.keys == ("net", "judge")
    assert step.plans["judge"].num_recomputed  # the trained one alone holds a fifth
    assert abs(step.surroundings.correction_bytes) < 0.01 * step.predicted_peak_bytes
    assert callback.result.measured_peak_bytes <= callback.result.budget_bytes


class Criterion(Deep):
    """The loss is a module, which holds the logarithms of many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.criterion = nn.Linear(16, 256), nn.CrossEntropyLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.net(batch[0]))
        return self.criterion(logits, logits.detach().argmax(1))


class Function(Criterion):
    """The loss is a function."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.net(batch[0]))
        return functional.cross_entropy(logits, logits.detach().argmax(1))


class Enlarged(Criterion):
    """What the next one saves is the result of a module that is no region."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.Upsample(scale_factor=8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.pool(self.net(batch[0])[None]).square().mean()


class Written(Enlarged):
    """The same in functions."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.interpolate(self.net(batch[0])[None], scale_factor=8).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(("as_module", "as_function"), [(Criterion, Function), (Enlarged, Written)])
def test_what_a_module_without_parameters_saves_is_told_as_of_a_function(
    as_module: type[LightningModule], as_function: type[LightningModule], tmp_path: Path
) -> None:
    found: list[tuple[int, int]] = []
    for kind in (as_module, as_function):
        callback = remat(memory_budget="100%")
        run(tmp_path / kind.__name__, kind(), callback, max_steps=1)
        assert callback.result is not None
        step = callback.result.step
        found.append((step.predicted_peak_bytes - step.surroundings.correction_bytes, step.predicted_peak_bytes))
    assert found[0] == found[1]
