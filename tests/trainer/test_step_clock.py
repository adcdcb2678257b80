"""The clock runs while steps are trained and at no other time, and meters one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule
from remat_runs import Classifier, Images, run, seeded
from same_runs import remat
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader

from lightning_remat.measure.meter import StorageMeter
from lightning_remat.measure.step_clock import StepClock

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]


class Validated(Classifier):
    """Is validated after every third step."""

    def val_dataloader(self) -> Any:
        return DataLoader(Images(24), batch_size=self.batch_size)


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


class Skipping(Callback):
    """Ends the first epoch before its third step, and looks at who meters in the second."""

    def __init__(self) -> None:
        self.most = 0

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 and trainer.current_epoch == 0 else None

    def on_before_zero_grad(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        meters = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, StorageMeter)]
        self.most = max(self.most, len(meters))


def test_a_step_that_is_skipped_is_not_metered_on(tmp_path: Path) -> None:
    skipping = Skipping()
    run(tmp_path, seeded(), remat(self_check=False), skipping, max_steps=-1, max_epochs=2)
    assert skipping.most == 1
