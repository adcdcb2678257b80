"""Which batch size a run has: kept, resumed, searched for, and where a search must not go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from remat_runs import run, seeded
from same_runs import BATCH, WIDTH, Deep, assert_same_run, remat, samples
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

import lightning_remat.trainer.planning as planning_module
from lightning_remat import InfeasibleBudgetError, Rematerialization

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]


class Sized(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(len(batch[0]))
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stored", "resumed"])
def test_keep_keeps_the_size_of_another_plan(tmp_path: Path, way: str) -> None:
    options: dict[str, Any] = {"plan_path": tmp_path / "plan.json"} if way == "stored" else {}
    trainer = run(tmp_path, seeded(Sized), remat(**options), max_steps=2)
    fit: dict[str, Any] = {}
    if way == "resumed":
        trainer.save_checkpoint(path := tmp_path / "run.ckpt")
        fit = {"ckpt_path": path}
    module, callback = seeded(Sized), remat(**options)
    module.batch_size = BATCH // 2
    run(tmp_path, module, callback, max_steps=4, fit=fit)
    assert set(module.seen) == {BATCH // 2}
    assert callback.result is not None
    assert callback.result.batch_size == BATCH // 2


@pytest.mark.slow
def test_resumed_run_of_the_same_size_takes_the_stored_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = run(tmp_path, seeded(Sized), remat(), max_steps=2)
    trainer.save_checkpoint(path := tmp_path / "run.ckpt")
    monkeypatch.setattr(planning_module, "find", lambda *a: pytest.fail("planned again"))
    module, callback = seeded(Sized), remat()
    run(tmp_path, module, callback, max_steps=4, fit={"ckpt_path": path})
    assert callback.result is not None


@pytest.mark.slow
@pytest.mark.parametrize("drop_last", [False, True])
def test_no_last_batch_of_one_sample_for_batch_norm(tmp_path: Path, drop_last: bool) -> None:
    class Odd(Sized):
        def train_dataloader(self) -> Any:
            return DataLoader(samples(4 * BATCH + 1), batch_size=8, drop_last=drop_last)

    module = seeded(Odd)
    callback = Rematerialization("periodic", memory_budget="1GiB", min_batch_size=62, max_batch_size=64)
    run(tmp_path, module, callback, max_steps=-1, max_epochs=1)
    assert callback.result is not None
    assert callback.result.batch_size == (64 if drop_last else 63)
    assert min(module.seen) > 1


class Few:
    """A batch sampler that does not tell how few samples it draws."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        yield list(range(FEW))[: self.batch_size]

    def __len__(self) -> int:
        return 1


def drawn(batch_size: int, num_samples: int | None, *, drop_last: bool = False) -> DataLoader[Any]:
    data = samples()
    return DataLoader(data, batch_size, sampler=RandomSampler(data, True, num_samples), drop_last=drop_last)


ALL, FEW = len(samples()), 20
DRAWN: dict[str, tuple[Callable[[int], Any], int, dict[str, Any], list[list[int]]]] = {
    "all": (lambda size: drawn(size, None), ALL, {}, [[ALL]]),
    "more": (lambda size: drawn(size, 300), 300, {}, [[300]]),
    "fewer": (lambda size: drawn(size, FEW), FEW, {}, [[FEW]]),
    "fewer, or none": (lambda size: drawn(size, FEW, drop_last=True), FEW, {}, [[FEW]]),
    "fewer, untold": (lambda size: DataLoader(samples(), batch_sampler=Few(size)), ALL, {}, [[FEW]]),
    "one fewer": (lambda size: [drawn(size, None), drawn(size, FEW)], ALL, {}, [[ALL, FEW]]),
    "one fewer, or none": (
        lambda size: [drawn(size, 2 * FEW), drawn(size, FEW, drop_last=True)], FEW, {}, [[FEW, FEW], [FEW, FEW]],
    ),
    "a third of an epoch, or none": (
        lambda size: drawn(size, None, drop_last=True), ALL // 4, {"limit_train_batches": 0.33}, [[ALL // 4]],
    ),
    "half an epoch": (lambda size: drawn(size, None), ALL // 2, {"limit_train_batches": 0.5}, [[ALL // 2]]),
}  # fmt: skip
"""The loaders, the largest size for which each epoch trains something, options, what an epoch's batches have."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Rematerialization plans anew. the plan was made for inputs float32 256×16")
@pytest.mark.parametrize("name", DRAWN)
def test_no_size_beyond_what_an_epoch_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever is allowed; it is reported and searched for once, where batches turn out smaller, too."""
    loaders, expected, options, batches = DRAWN[name]

    class Drawn(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            parts = batch if isinstance(batch[0], list) else [batch]
            self.seen.append([len(part[0]) for part in parts])
            return sum(self.net(part[0]).square().mean() for part in parts)

        def train_dataloader(self) -> Any:
            return loaders(self.batch_size)

    tried: list[Any] = []
    found = planning_module.find
    monkeypatch.setattr(
        planning_module, "find", lambda trial, given: tried.append(given.batch_size) or found(trial, given)
    )
    module, callback = seeded(Drawn), remat(batch_size="auto", memory_budget="1GiB", max_batch_size=10000)
    module.batch_size = 8
    run(tmp_path, module, callback, max_steps=-1, max_epochs=2, **options)
    assert callback.result is not None
    assert callback.result.batch_size == expected
    assert module.seen == batches * 2
    assert tried.count("auto") == 1


@pytest.mark.slow
@pytest.mark.parametrize("on_infeasible", ["raise", "minimum"])
def test_batch_norm_at_one_sample_is_a_lower_limit_in_the_trainer(tmp_path: Path, on_infeasible: Any) -> None:
    """It is no size that a step could be planned for, nor a reason to leave the model as it is."""
    callback = remat(batch_size="auto", memory_budget="20KiB", on_infeasible=on_infeasible)
    if on_infeasible == "raise":
        with pytest.raises(InfeasibleBudgetError, match="at batch size 2"):
            run(tmp_path, seeded(Sized), callback, max_steps=1)
        return
    module = seeded(Sized)
    with pytest.warns(UserWarning, match="the lowest peak instead"):
        run(tmp_path, module, callback, max_steps=1)
    assert callback.result is not None
    assert callback.result.batch_size == module.seen[-1] == 2


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield [torch.ones(WIDTH)]


@pytest.mark.slow
def test_data_of_unknown_length_need_a_limit(tmp_path: Path) -> None:
    class Streaming(Sized):
        def train_dataloader(self) -> Any:
            return DataLoader(Endless(), batch_size=8)

    with pytest.raises(MisconfigurationException, match="give max_batch_size"):
        run(tmp_path, seeded(Streaming), remat(batch_size="auto"))
    module = seeded(Streaming)
    run(tmp_path, module, remat(batch_size="auto", memory_budget="1GiB", max_batch_size=20), max_steps=2)
    assert module.seen == [20, 20]


@pytest.mark.slow
def test_search_gives_the_run_of_the_size_that_it_finds(tmp_path: Path) -> None:
    """Loaders that draw while they are built, schedules that count batches, workers: all as if set by hand."""

    class Counting(Sized):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            total = int(self.trainer.estimated_stepping_batches) if self.asks_early else 4
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=total)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def train_dataloader(self) -> Any:
            self.seen.append("built")
            noise = torch.rand(4 * BATCH, WIDTH)
            data = torch.utils.data.TensorDataset(samples().tensors[0] + noise)
            return DataLoader(data, batch_size=self.batch_size, shuffle=True, num_workers=1)

    for asks_early in (False, True):
        calls: list[Any] = []

        def factory(asks_early: bool = asks_early, calls: list[Any] = calls) -> Any:
            module = Counting()
            module.asks_early = asks_early
            if calls:
                module.batch_size = BATCH // 2
            calls.append(module)
            return module

        callback = remat(batch_size="auto", memory_budget="1GiB", min_batch_size=BATCH, max_batch_size=BATCH)
        kind = tmp_path / str(asks_early)
        assert_same_run(kind, factory, callback=callback, max_steps=-1, max_epochs=1, is_planned=None)


def test_search_refuses_what_cannot_begin_again(tmp_path: Path) -> None:
    class Once(Dataset[Any]):
        pass

    loader = DataLoader(samples(), batch_size=BATCH)
    with pytest.raises(MisconfigurationException, match=r"cannot begin again.*batch_size='keep'"):
        run(tmp_path, seeded(Sized), remat(batch_size="auto"), fit={"train_dataloaders": iter(loader)})


@pytest.mark.slow
def test_reports_go_where_the_logger_writes_or_nowhere(tmp_path: Path) -> None:
    def reports(root: Path) -> list[str]:
        return sorted(str(p.relative_to(root).parent) for p in root.rglob("remat_report.json"))

    run(tmp_path / "none", seeded(Sized), remat(), max_steps=2)
    assert reports(tmp_path / "none") == []
    logger = CSVLogger(tmp_path / "logger", name="mine")
    run(tmp_path / "root", seeded(Sized), remat(), max_steps=2, logger=logger)
    assert reports(tmp_path / "root") == []
    assert reports(tmp_path / "logger") == ["mine/version_0"]
    run(tmp_path / "other", seeded(Sized), remat(report_dir=tmp_path / "named"), max_steps=2)
    assert reports(tmp_path / "named") == ["."]


@pytest.mark.parametrize("budget", ["150%", "100.1%", "1000 %"])
def test_more_than_the_plain_peak_is_refused(budget: str) -> None:
    with pytest.raises(ValueError, match="at most 100% of the plain peak"):
        Rematerialization(memory_budget=budget)
