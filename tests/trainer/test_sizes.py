"""Which batch size a run has: kept, resumed, searched for, and where a search must not go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from remat_runs import run, seeded
from same_runs import BATCH, WIDTH, Deep, assert_same_run, remat, samples
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from lightning_remat import Rematerialization

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
    import lightning_remat.trainer.planning as planning_module

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


@pytest.mark.slow
@pytest.mark.parametrize(("num_drawn", "expected"), [(None, 4 * BATCH), (5 * BATCH, 5 * BATCH), (20, 4 * BATCH)])
def test_no_size_beyond_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_drawn: int | None, expected: int
) -> None:
    """Whatever is allowed; a sampler may draw more than there is, and fewer, which is not planned for once more."""
    import lightning_remat.trainer.planning as planning_module

    class Drawn(Sized):
        def train_dataloader(self) -> Any:
            data = samples()
            sampler = RandomSampler(data, replacement=True, num_samples=num_drawn)
            return DataLoader(data, batch_size=self.batch_size, sampler=sampler)

    searches: list[Any] = []
    find = planning_module.find
    monkeypatch.setattr(planning_module, "find", lambda *a: searches.append(a) or find(*a))
    module, callback = seeded(Drawn), remat(batch_size="auto", memory_budget="1GiB", max_batch_size=10000)
    run(tmp_path, module, callback, max_steps=2)
    assert callback.result is not None
    assert callback.result.batch_size == expected
    assert module.seen == [num_drawn or expected] * 2
    assert len(searches) == 1


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
