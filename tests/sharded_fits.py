"""Fits of two processes under Lightning's ModelParallelStrategy, run by sharded_run.py: plain, and by the callback."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from diary import Diary
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from remat_runs import Peaks
from sharded_nets import FEATURES, HALF, SAMPLES, Transformer, assert_same, counted, shard
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import lightning_remat.batch_search.search as search
from lightning_remat import Rematerialization
from lightning_remat.batch_search.settings import Settings
from lightning_remat.measure.device_memory import DeviceMemory
from lightning_remat.module_state import agreement
from lightning_remat.module_state.sharding import local_part


class Sharded(LightningModule):
    """Sharded where Lightning wants it."""

    num_stages: ClassVar[int] = 0
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.batch_size = Transformer(stages=self.num_stages), SAMPLES

    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            shard(self.net, mesh=self.device_mesh["data_parallel"], **self.options)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), 1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        samples = torch.randn(16 * SAMPLES, FEATURES, generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(samples), batch_size=self.batch_size)


def fit(
    folder: Path,
    save: str,
    callback: Rematerialization | None,
    kind: type[Sharded] = Sharded,
    *,
    batch_size: int = SAMPLES,
    tensor_parallel_size: int = 1,
    **options: Any,
) -> list[Tensor]:
    """The weights and the random state after training."""
    module, resumed = kind(), options.pop("ckpt_path", None)
    module.batch_size = batch_size
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(
            data_parallel_size=2 // tensor_parallel_size, tensor_parallel_size=tensor_parallel_size
        ),
        callbacks=[] if callback is None else [callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2,
        max_epochs=4,
        **{"gradient_clip_val": 0.5, "logger": False, **options},
    )
    torch.manual_seed(11 + trainer.global_rank)
    trainer.fit(module, ckpt_path=resumed)
    assert trainer.global_step == options["max_steps"], trainer.global_step
    trainer.save_checkpoint(folder / save)
    return [*(local_part(p.detach()).clone() for p in module.parameters()), torch.get_rng_state()]


class Nested(Sharded):
    """Units within units, computed in half, all resharded."""

    num_stages = 2
    options: ClassVar[dict[str, Any]] = {"mp_policy": HALF, "reshard_after_forward": True}


def in_trainer(kind: type[Sharded], folder: Path) -> None:
    """Accumulation, clipping and dropout in Lightning; the checkpoint of either run is resumed, and the same."""
    folder = folder / kind.__name__
    for k, resumed in enumerate((False, True)):
        outcomes: list[list[Tensor]] = []
        for name in ("plain", "planned"):
            callback = (
                None if name == "plain" else Rematerialization("periodic", memory_budget="85%", batch_size="keep")
            )
            paths = {"ckpt_path": folder / f"{name}-0"} if resumed else {}
            outcomes.append(fit(folder, f"{name}-{k}", callback, kind, max_steps=3 * (k + 1), **paths))
            if callback is not None:
                assert callback.result is not None
                step = callback.result.step
                assert step.num_recomputed, "nothing is recomputed"
                assert abs(step.surroundings.correction_bytes) < 0.02 * step.predicted_peak_bytes, step.surroundings
        assert_same(*outcomes)
        if dist.get_rank() == 0:
            assert_same(*(consolidated(folder / f"{name}-{k}") for name in ("plain", "planned")))


def consolidated(checkpoint: Path) -> list[Tensor]:
    """The weights of a checkpoint that all ranks have written, in one piece."""
    whole = checkpoint.with_suffix(".pt")
    dcp_to_torch_save(checkpoint, whole)
    state: dict[str, Tensor] = torch.load(whole)["state_dict"]
    assert state["net.head.weight"].shape == Transformer().head.weight.shape
    return list(state.values())


class Counted(Sharded):
    """Notes how often anything was gathered in each batch."""

    gathers: ClassVar[list[None]] = []
    per_batch: ClassVar[list[int]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.per_batch.append(len(self.gathers))
        self.gathers.clear()


def gathers_as_planned_in_trainer(folder: Path) -> None:
    """Fewer gathers than plain FSDP2 makes where the budget leaves room for it, and the same bits."""
    asked: dict[str, Any] = {"plain": None, "measured": "measure", "given": 1e9}
    outcomes: dict[str, list[Tensor]] = {}
    counts: dict[str, list[int]] = {}
    for name, bandwidth in asked.items():
        callback = None
        if bandwidth is not None:
            callback = Rematerialization("periodic", memory_budget="95%", batch_size="keep", gather_bandwidth=bandwidth)
        with counted(_fsdp_param_group, "foreach_all_gather") as gathers:
            Counted.gathers, Counted.per_batch = gathers, []
            outcomes[name] = fit(folder, f"gathers-{name}", callback, Counted, max_steps=3)
        counts[name] = Counted.per_batch[1:]  # in the first the step is planned
        if callback is not None:
            assert callback.result is not None
            step = callback.result.step
            assert step.num_recomputed, "nothing is recomputed"
            assert step.surroundings.gathering is not None
            again = step.surroundings.gathering.second_gathers
            assert set(counts[name]) == {5 + again}, (counts[name], again)  # five units, of which so many twice
    for name in ("measured", "given"):
        assert_same(outcomes["plain"], outcomes[name])
        assert len(counts[name]) == len(counts["plain"]) == 5
        assert all(a < b for a, b in zip(counts[name], counts["plain"], strict=True)), counts


class Growing(Sharded):
    """Of the third step on, the batches of the second process have as many samples more."""

    def train_dataloader(self) -> DataLoader[Any]:
        samples = torch.randn(16 * SAMPLES, FEATURES, generator=torch.Generator().manual_seed(3))
        sizes = [SAMPLES, SAMPLES, *[SAMPLES * (1 + self.global_rank)] * 6]
        sampler: Any = [list(range(size)) for size in sizes]
        return DataLoader(TensorDataset(samples), batch_sampler=sampler)


def grows_in_trainer(folder: Path) -> None:
    """What only one process's batch is too large for is planned anew by both, and the budget kept."""
    logger, options = Peaks(), {"max_steps": 4, "use_distributed_sampler": False}
    plain = fit(folder, "grown-plain", None, Growing, **options)
    callback = Rematerialization("periodic", memory_budget="90%", batch_size="keep", report_dir=folder)
    assert_same(plain, fit(folder, "grown", callback, Growing, logger=logger, log_every_n_steps=1, **options))
    assert callback.result is not None
    found: list[Any] = [None, None]
    dist.all_gather_object(found, (str(callback.result.step.plans), callback.result.budget_bytes))
    assert found[0] == found[1]
    assert callback.result.batch_size == 2 * SAMPLES
    assert max(logger.peaks) <= callback.result.budget_bytes


class TensorParallel(Sharded):
    """Blocks whose layers are spread over the processes."""

    is_sharded: ClassVar[bool] = False

    def configure_model(self) -> None:
        for block in self.net.stages[0]:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)
        if self.is_sharded:
            shard(self.net, mesh=self.device_mesh["data_parallel"])


class BothParallel(TensorParallel):
    """The same, under fully_shard too."""

    is_sharded = True


def tensor_parallel_in_trainer(folder: Path) -> None:
    """The model is left as it is, with a sentence that says why and what to do; training has the plain run's bits."""
    options: dict[str, Any] = {"tensor_parallel_size": 2, "max_steps": 2, "gradient_clip_val": None}
    for kind in (TensorParallel, BothParallel):
        plain = fit(folder, f"{kind.__name__}-plain", None, kind, **options)
        callback = Rematerialization("periodic", memory_budget="85%", batch_size="keep")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = fit(folder, f"{kind.__name__}-ours", callback, kind, **options)
        assert_same(plain, found)
        assert callback.result is None
        if dist.get_rank() == 0:
            said = "leaves the model as it is.*tensor parallel.*Remedy: shard it by fully_shard"
            assert any(re.search(said, str(w.message), re.DOTALL) for w in told), [str(w.message) for w in told]


class Fails(Sharded):
    """The first step that recomputes, which is tried before training, fails on the second process alone."""

    error: ClassVar[Exception] = ArithmeticError("of the second process")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == 1 and "_rematerialization" in vars(self.net.stages[0][0]):
            raise self.error
        return super().training_step(batch, batch_idx)


class RunsOut(Fails):
    """It runs out of memory there."""

    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: of the second process")


class AllRunOut(Sharded):
    """The first step that recomputes runs out of memory on all processes, each of which has its own words for that."""

    sizes: ClassVar = Diary[int]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if "_rematerialization" in vars(self.net.stages[0][0]):
            self.sizes.add(len(batch[0]))
            if len(self.sizes) == 1:
                raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: of process {self.global_rank}")
        return super().training_step(batch, batch_idx)


def searched(folder: Path, save: str, kind: type[Sharded] = Sharded) -> tuple[Rematerialization, list[Tensor]]:
    """The callback after a search of processes that have different memory, and what was trained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "device_memory", lambda device: DeviceMemory((8, 4)[dist.get_rank()] * 2**20, 2**30))
        callback = Rematerialization("periodic", margin=0.0, multiple_of=16, max_batch_size=4096)
        return callback, fit(folder, save, callback, kind, batch_size=64, max_steps=2)


def finds_a_size(folder: Path) -> None:
    """One size for both processes, and the bits of plain FSDP2 at it."""
    callback, found = searched(folder, "auto")
    assert callback.result is not None
    size, step = callback.result.batch_size, callback.result.step
    sizes: list[Any] = [None, None]
    dist.all_gather_object(sizes, (size, str(step.plans)))
    assert sizes[0] == sizes[1]
    assert size > 64
    assert step.num_recomputed
    # What is free of the process that has less, and what it holds already.
    assert callback.result.measured_peak_bytes <= callback.result.budget_bytes < 4.1 * 2**20
    assert_same(fit(folder, "auto-plain", None, batch_size=size, max_steps=2), found)


def all_run_out(folder: Path) -> None:
    """Where every process runs out of memory, a smaller size is tried next; all take the one that fitted last.

    Tensors alone are counted: of so small a step the rest of the process's memory, which differs from run to run, is
    the larger part.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Settings, "counts_scratch", False)
        callback, _ = searched(folder, "smaller", AllRunOut)
    assert callback.result is not None
    found: list[Any] = [None, None]
    dist.all_gather_object(found, (callback.result.batch_size, callback.result.measured_peak_bytes))
    tried = AllRunOut.sizes.read()
    assert 64 < tried[1] < tried[0], tried
    assert found[0] == found[1]
    assert tried[1] <= callback.result.batch_size in tried, (found, tried)
    assert callback.result.measured_peak_bytes <= callback.result.budget_bytes


def one_fails(folder: Path) -> None:
    """Each process writes with what error it ends."""
    with written_error(folder):
        fit(folder, "fails", Rematerialization("periodic", memory_budget="85%", batch_size="keep"), Fails, max_steps=2)


def one_runs_out(folder: Path) -> None:
    """The same of a search."""
    with written_error(folder):
        searched(folder, "fails", RunsOut)


@contextmanager
def written_error(folder: Path) -> Generator[None]:
    agreement.PATIENCE = timedelta(seconds=5)
    try:
        yield
    except BaseException as error:
        (folder / f"failed-{dist.get_rank()}").write_text(f"{type(error).__name__}: {error}")
        raise


FITS: dict[str, Callable[[Path], None]] = {
    "in_trainer": partial(in_trainer, Sharded),
    "in_trainer_nested": partial(in_trainer, Nested),
    "gathers_as_planned_in_trainer": gathers_as_planned_in_trainer,
    "finds_a_size": finds_a_size,
    "grows_in_trainer": grows_in_trainer,
    "all_run_out": all_run_out,
    "tensor_parallel_in_trainer": tensor_parallel_in_trainer,
}
"""What is run one after another in a folder."""
