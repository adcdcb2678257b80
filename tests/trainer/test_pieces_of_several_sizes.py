"""Forwards in pieces that are called at several sizes, or with several numbers, beside the run without the callback.

They have code of their own: TorchDynamo remembers of any code of which sizes it was called.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from same_runs import assert_same_run, remat
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_remat.batch_search.trial as module_under_test
from lightning_remat import TraceError, find_batch_size
from lightning_remat.errors import MismatchError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = torch.tanh(step(x)).sigmoid()
        return x


class Halving(LightningModule):
    """Each of its pieces is called at half the length of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = Layer(), Layer()

    def half(self, x: Tensor) -> Tensor:
        return x.square()[:, ::2]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            if x.abs().max().item() < 0:
                raise ValueError
            x = self.half(self.layer(x))
        return self.last(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        samples = torch.randn(128, 32, 16, generator=torch.Generator().manual_seed(5))
        return DataLoader(TensorDataset(samples), batch_size=32)


class InFunctions(Halving):
    """Nothing of its own forward is captured; what that calls is."""

    def forward(self, x: Tensor) -> Tensor:
        np.ceil(np.log(len(x))).astype("int").item()
        for _ in range(3):
            x = self.half(self.layer(x))
        return self.last(x)


class Numbered(Halving):
    """Its pieces are called with 0, 1, 2, as those of Hugging Face's BigBird."""

    def part(self, x: Tensor, number: int) -> Tensor:
        x = self.layer(x).square()
        np.random.seed(number)  # noqa: NPY002
        return (torch.tanh(x) * number).sigmoid().tanh()

    def forward(self, x: Tensor) -> Tensor:
        for k in range(3):
            x = self.part(x, k)
        return self.last(x)


class Inside(LightningModule):
    """Such a forward is that of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Halving(), nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.encoder(batch[0])).square().mean()

    configure_optimizers, train_dataloader = Halving.configure_optimizers, Halving.train_dataloader


@pytest.mark.parametrize("kind", [Halving, InFunctions, Numbered, Inside])
def test_the_run_is_that_without_the_callback_and_peaks_are_as_predicted(
    tmp_path: Path, kind: type[LightningModule]
) -> None:
    whole = assert_same_run(tmp_path, kind, callback=remat(memory_budget="100%"), is_planned=False).result
    assert whole is not None
    assert whole.measured_peak_bytes == pytest.approx(whole.step.plain_peak_bytes, rel=0.05)
    planned = assert_same_run(tmp_path, kind, callback=remat(memory_budget="80%")).result
    assert planned is not None
    assert planned.measured_peak_bytes is not None
    assert planned.measured_peak_bytes <= planned.budget_bytes < whole.measured_peak_bytes
    assert planned.measured_peak_bytes == pytest.approx(planned.predicted_peak_bytes, rel=0.05)


class _Mismatching:
    """`programs_of`, to which the step calls something else than what was planned, so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.times, self._original = times, module_under_test.programs_of
        monkeypatch.setattr(module_under_test, "programs_of", self)

    def __call__(self, *args: Any) -> Any:
        self.times -= 1
        if self.times >= 0:
            raise MismatchError("the plan is for ['[3]'], which the step does not call")
        return self._original(*args)


def test_a_step_that_is_captured_otherwise_once_is_planned_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning_remat")
    told = _Mismatching(monkeypatch, 1)
    assert_same_run(tmp_path)
    assert told.times < 0
    assert sum("planned once more" in record.message for record in caplog.records) == 1


def test_a_step_that_is_captured_otherwise_each_time_leaves_the_model_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Mismatching(monkeypatch, 99)
    with pytest.warns(UserWarning, match="leaves the model as it is: the training step is captured as something else"):
        assert_same_run(tmp_path, is_planned=False)


def test_a_loop_in_plain_pytorch_is_told_that_nothing_can_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    told = _Mismatching(monkeypatch, 99)
    module, batch = Layer(), torch.randn(64, 16)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    with pytest.raises(TraceError, match="captured as something else whenever it is run"):
        find_batch_size(
            module, batch, lambda x: module(x).sum(), optimizer, "periodic", memory_budget="80%", batch_size="keep"
        )
    assert told.times == 97
    assert "forward" not in vars(module)


def test_a_stored_plan_that_does_not_fit_when_it_is_installed_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    first = assert_same_run(tmp_path, callback=remat(plan_path=path)).result
    _Mismatching(monkeypatch, 1)
    with pytest.warns(UserWarning, match="plans anew: the plan is for"):
        second = assert_same_run(tmp_path, callback=remat(plan_path=path)).result
    assert first is not None
    assert second is not None
    assert second.budget_bytes == first.budget_bytes
