"""The step is planned on the first batch that training brings, after everything that a step may need was made."""

from __future__ import annotations

import csv
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from remat_runs import run
from same_runs import BATCH, WIDTH, Deep, assert_same_run, remat, samples
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]
START_HOOKS = ["on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"]


class Needs(Deep):
    """A step that needs what a start hook makes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        self.seen = list(self.losses)
        return loss


@pytest.mark.slow
@pytest.mark.parametrize("hook", START_HOOKS)
def test_what_the_modules_start_hooks_make_is_there(tmp_path: Path, hook: str) -> None:
    def make(self: Any, *args: Any) -> None:
        self.losses = []

    assert_same_run(tmp_path, type("Own", (Needs,), {hook: make}))


@pytest.mark.slow
@pytest.mark.parametrize("hook", START_HOOKS)
def test_what_other_callbacks_make_is_there(tmp_path: Path, hook: str) -> None:
    def make(self: Any, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.losses = []

    assert_same_run(tmp_path, Needs, callbacks=lambda: [type("Makes", (Callback,), {hook: make})()])


class Positioned(IterableDataset[Any]):
    """Goes on where the last reader stopped."""

    def __init__(self, module: LightningModule) -> None:
        self.items = iter(samples(8 * BATCH))
        self.module = module

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            self.module.seen.append(item[0])  # pyright: ignore
            yield item


class Augmenting(Dataset[Any]):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return 4 * BATCH

    def __getitem__(self, index: int) -> Any:
        return [torch.randn(WIDTH, generator=self.generator)]


class Held:
    """An iterator where others give a loader."""

    def __init__(self) -> None:
        self.items = iter(DataLoader(samples(), batch_size=BATCH))

    def __iter__(self) -> Held:
        return self

    def __next__(self) -> Any:
        return next(self.items)


_FORK = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
"""Others send the data to the worker, and PyTorch sends no generator (Python 3.14 forks only where it is told to)."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork")
@pytest.mark.parametrize(
    "loader",
    [
        lambda module: DataLoader(Positioned(module), batch_size=BATCH),
        lambda module: DataLoader(Augmenting(), batch_size=BATCH),
        lambda module: DataLoader(Augmenting(), batch_size=BATCH, num_workers=1, multiprocessing_context=_FORK),
        lambda module: Held(),
    ],
    ids=["positioned", "own-generator", "worker", "iterator"],
)
def test_training_gets_every_batch(tmp_path: Path, loader: Any) -> None:
    assert_same_run(tmp_path, fit=lambda module: {"train_dataloaders": loader(module)}, max_steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", ["keep", BATCH, 2 * BATCH])
def test_loaders_are_built_once(tmp_path: Path, batch_size: Any) -> None:
    class Counting(Deep):
        def train_dataloader(self) -> Any:
            self.seen.append("built")
            return super().train_dataloader()

    calls: list[Any] = []

    def factory() -> Any:
        calls.append(module := Counting())
        module.batch_size = BATCH if batch_size == "keep" else batch_size
        if len(calls) == 2:
            module.batch_size = BATCH
        return module

    assert_same_run(tmp_path, factory, callback=remat(batch_size=batch_size))


class Asking(Deep):
    """Asks the trainer inside the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        trainer, logger = self.trainer, self.logger
        assert logger is not None
        assert trainer.checkpoint_callback is not None
        assert isinstance(logger, CSVLogger)
        assert Path(logger.log_dir).name == "version_0"
        loader: Any = trainer.train_dataloader
        facts = [trainer.num_training_batches, len(loader), loader.num_workers, batch_idx, trainer.global_step]
        self.seen.append([*facts, int(trainer.estimated_stepping_batches), type(logger).__name__])
        logger.experiment.log_metrics({"mine": 1.0})
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", ["keep", "auto"])
def test_the_trainer_answers_as_in_training(tmp_path: Path, batch_size: Any) -> None:
    options: dict[str, Any] = {"batch_size": batch_size}
    if batch_size == "auto":
        options |= {"min_batch_size": BATCH, "max_batch_size": BATCH}
    found: list[Any] = []
    for kind, ours in (("plain", []), ("planned", [remat(**options)])):
        logger, module = CSVLogger(tmp_path / kind, flush_logs_every_n_steps=1), Asking()
        run(tmp_path, module, *ours, logger=logger, enable_checkpointing=True, max_steps=2)
        rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
        found.append((module.seen, [row["mine"] for row in rows if row["mine"]]))
    assert found[0] == found[1]
    assert len(found[0][1]) == 2


class NoneFirst(Deep):
    def train_dataloader(self) -> Any:
        data = samples()

        def collate(items: Any) -> Any:
            return None if items[0][0] is data[0][0] or torch.equal(items[0][0], data[0][0]) else default_collate(items)

        return DataLoader(data, batch_size=self.batch_size, collate_fn=collate)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", ["keep", "auto"])
@pytest.mark.filterwarnings("ignore:.*train_dataloader yielded None")
def test_first_batch_of_none(tmp_path: Path, batch_size: Any) -> None:
    limits = {} if batch_size == "keep" else {"min_batch_size": BATCH, "max_batch_size": BATCH}
    assert_same_run(tmp_path, NoneFirst, callback=remat(batch_size=batch_size, **limits))


@pytest.mark.parametrize(
    "options",
    [{"max_steps": 0}, {"max_steps": -1, "max_epochs": 0}, {"limit_train_batches": 0}],
    ids=["steps", "epochs", "batches"],
)
@pytest.mark.parametrize("batch_size", ["keep", "auto"])
def test_nothing_is_profiled_where_nothing_is_trained(tmp_path: Path, options: dict[str, Any], batch_size: Any) -> None:
    class Never(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("a step was run")

    callback = assert_same_run(tmp_path, Never, callback=remat(batch_size=batch_size), is_planned=None, **options)
    assert callback.result is None


@pytest.mark.parametrize("batch_size", ["keep", "auto"])
@pytest.mark.filterwarnings("ignore:Total length of `(DataLoader|CombinedLoader)` across ranks is zero")
def test_empty_loader(tmp_path: Path, batch_size: Any) -> None:
    callback = remat(batch_size=batch_size, **({} if batch_size == "keep" else {"max_batch_size": 8}))
    empty = lambda module: {"train_dataloaders": DataLoader(samples(0))}  # noqa: E731
    assert_same_run(tmp_path, callback=callback, fit=empty, is_planned=None)
    assert callback.result is None


@pytest.mark.slow
def test_a_step_skipped_by_its_hook_is_not_the_first(tmp_path: Path) -> None:
    class Skips(Deep):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 else None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.current_epoch > 0
            return super().training_step(batch, batch_idx)

    assert_same_run(tmp_path, Skips, max_epochs=2, max_steps=-1)


@pytest.mark.parametrize("batch_size", ["keep", "auto", 8])
def test_a_missing_loader_gets_lightnings_own_message(tmp_path: Path, batch_size: Any) -> None:
    class Missing(Deep):
        def train_dataloader(self) -> Any:
            return None

    with pytest.raises(TypeError, match=r"An invalid dataloader was returned from `Missing\.train_dataloader\(\)`"):
        run(tmp_path, Missing(), remat(batch_size=batch_size))


class Restarting:
    """No DataLoader: every `iter` begins anew."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[samples().tensors[0][i : i + BATCH]] for i in (0, BATCH)])


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", ["keep", BATCH])
def test_iterators_that_restart(tmp_path: Path, batch_size: Any) -> None:
    fit: Any = lambda module: {"train_dataloaders": Restarting()}  # noqa: E731
    assert_same_run(tmp_path, callback=remat(batch_size=batch_size), fit=fit, max_epochs=2, max_steps=-1)


def test_a_loader_that_says_no_size_and_has_another_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="Give rebatch_fn"):
        run(tmp_path, Deep(), remat(batch_size=8), fit={"train_dataloaders": Restarting()})
