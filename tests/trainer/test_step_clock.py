"""The clock runs while steps are trained and at no other time, and meters them as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from remat_runs import Classifier, Images, Peaks, run, seeded
from same_runs import WIDTH, assert_same_run, deep, remat, samples
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_remat.measure.step_clock import StepClock

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]


class Validated(Classifier):
    """Is validated after every third step."""

    def val_dataloader(self) -> Any:
        return DataLoader(Images(24), batch_size=self.batch_size)


@pytest.mark.slow
def test_it_stands_still_in_validation_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def noted(name: str, original: Callable[..., None]) -> Callable[..., None]:
        def note(*args: Any) -> None:
            events.append(name)
            original(*args)

        return note

    for name in ("start", "stop", "count"):
        monkeypatch.setattr(StepClock, name, noted(name, getattr(StepClock, name)))
    run(tmp_path, seeded(Validated), remat(), val_check_interval=3, max_steps=9, log_every_n_steps=100)
    assert events.count("count") == 9
    assert events.count("stop") > 2
    is_running = False
    for event in events:
        is_running = (is_running or event == "start") and event != "stop"
        assert is_running or event != "count", events


class Projects(LightningModule):
    """Computes what PyTorch computes otherwise under a mode that sees operations."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 128), deep(128))  # wide, so that little things weigh little
        self.head = nn.Linear(128, 9)
        self.register_buffer("camera", torch.randn(1, 3, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = self.head(self.net(batch[0])).view(-1, 3, 3)
        return (y @ self.camera).square().mean() + y.sigmoid().prod(-1).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(samples(2048), batch_size=512)


@pytest.mark.slow
def test_a_metered_step_has_the_bits_of_the_plain_one(tmp_path: Path) -> None:
    peaks = Peaks()
    callback = assert_same_run(tmp_path, Projects, max_steps=4, logger=peaks)
    assert callback.result is not None
    assert len(peaks.peaks) == 4
    assert max(peaks.peaks) == pytest.approx(callback.result.measured_peak_bytes, rel=0.02)
