"""One rank of distributed runs on the CPU, started by test_callback_ddp.py; writes what it saw to files."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from exchanging_modules import Gathered
from forked_ranks import run_ranks
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from remat_runs import Classifier, Images, Peaks, Reader, network, run, seeded
from synchronized_kernels import HostSyncBatchNorm
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader

import lightning_remat.batch_search.search as search
import lightning_remat.trainer.planning as planning
from lightning_remat import Rematerialization
from lightning_remat.measure.device_memory import DeviceMemory

EFFECTIVE_BATCH_SIZE = 240
"""Samples an optimizer step, of both ranks."""

TEXTS_BYTES = 740_000
"""The budget of texts, of which the longest needs a third more."""


class Sharded(Classifier):
    """Enough data that memory is the limit."""

    def train_dataloader(self) -> DataLoader[object]:
        return DataLoader(Images(400), batch_size=self.batch_size, shuffle=True)


def main(folder: Path) -> None:
    """All runs by one process a rank, whose start takes longer than the runs."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    fit(folder, "plain")
    fit(folder, "keep", Rematerialization("periodic", memory_budget="80%", batch_size="keep"))
    module = seeded(Sharded)
    parameters, rest = list(module.parameters()), [*module.buffers(), *next(iter(module.train_dataloader()))]
    # With the buckets that DDP makes of the gradients, and the first batch, before anything is planned.
    alive = sum(t.untyped_storage().nbytes() for t in [*parameters, *parameters, *rest])
    # The ranks do not have the same memory: rank 1 has less.
    search.device_memory = lambda device: DeviceMemory((48, 16)[trainer_rank()] * 2**20 - alive, 2**30)
    fit(folder, "search", Rematerialization("periodic", margin=0.0))
    views = DDPStrategy(gradient_as_bucket_view=True)
    fit(folder, "views", Rematerialization("periodic", memory_budget="80%", batch_size="keep"), strategy=views)
    fit(folder, "plain-synchronized", factory=Synchronized)
    callback = Rematerialization("periodic", memory_budget="80%", batch_size="keep")
    fit(folder, "synchronized", callback, factory=Synchronized)
    fit(folder, "plain-contrasting", factory=Contrasting)
    callback = Rematerialization("periodic", memory_budget="80%", batch_size="keep")
    fit(folder, "contrasting", callback, factory=Contrasting)
    fit_branching(folder)
    fit_texts(folder)
    fit_resumed(folder)


class Synchronized(Sharded):
    """Ranks share the statistics of their batch norms."""

    def __init__(self) -> None:
        layers = [HostSyncBatchNorm(16) if isinstance(layer, nn.BatchNorm2d) else layer for layer in network()]
        super().__init__(nn.Sequential(*layers))


class Between(nn.Module):
    """Adds the mean of what all ranks have found half way."""

    def __init__(self) -> None:
        super().__init__()
        layers = [*network()]
        self.before, self.after = nn.Sequential(*layers[:13]), nn.Sequential(*layers[13:])

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.after(x + Gathered.apply(x).mean(0, keepdim=True))


class Contrasting(Sharded):
    """Ranks exchange what they have found within the network, and compare all samples behind it."""

    def __init__(self) -> None:
        super().__init__(Between())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.sizes.append(len(batch[0]))
        found = self(batch[0])
        alike = found @ self.all_gather(found, sync_grads=True).flatten(0, 1).T
        own = torch.arange(len(found)) + len(found) * self.trainer.global_rank
        return nn.functional.cross_entropy(alike, own)


class Branching(Sharded):
    """Of two heads every other step trains the second; so does a step that is tried before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.has_branches = nn.Linear(5, 5), True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.sizes.append(len(batch[0]))
        found = self(batch[0])
        if self.has_branches and batch_idx % 2:
            found = self.second(found)
        return nn.functional.cross_entropy(found, batch[1])


class Unused(Branching):
    """The second head is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.has_branches = False


def fit_branching(folder: Path) -> None:
    """What DDP is told of parameters that a step does not use, and of how often each is."""
    for kind, factory, options in (
        ("branching", Branching, {"find_unused_parameters": True}),
        ("unused", Unused, {"static_graph": True, "ddp_comm_hook": fp16_compress_hook}),
    ):
        fit(folder, f"plain-{kind}", factory=factory, strategy=DDPStrategy(**options))
        callback = Rematerialization("periodic", memory_budget="80%", batch_size="keep", self_check=True)
        fit(folder, kind, callback, factory=factory, strategy=DDPStrategy(**options))


class Texts(Reader):
    """Every rank has lengths of its own."""

    def train_dataloader(self) -> Any:
        self.lengths = self.lengths[trainer_rank() :: 2]
        return super().train_dataloader()


def fit_texts(folder: Path) -> None:
    """Batches of which now one rank has a larger one, now the other: planned anew by both."""
    options: dict[str, Any] = {"use_distributed_sampler": False, "max_epochs": 1, "max_steps": -1}
    factory = partial(Texts, 20, 16, 16, 20, 60, 20, 20, 70, 33, 24, 24, 80)
    fit(folder, "plain-texts", factory=factory, **options)
    logger, callback = Peaks(), Rematerialization("periodic", memory_budget=TEXTS_BYTES, batch_size="keep")
    fit(folder, "texts", callback, factory=factory, logger=logger, **options)
    (folder / f"peaks-{trainer_rank()}.json").write_text(json.dumps(logger.peaks))


def fit_resumed(folder: Path) -> None:
    """An epoch whose search also sets the accumulation, another from its checkpoint, and both plainly."""
    callback = Rematerialization("periodic", margin=0.0, effective_batch_size=EFFECTIVE_BATCH_SIZE)
    trainer = fit(folder, "effective", callback, max_steps=-1, max_epochs=1)
    assert callback.result is not None
    trainer.save_checkpoint(folder / "run.ckpt")
    size, accumulated = callback.result.batch_size, trainer.accumulate_grad_batches
    plain: dict[str, Any] = {"batch_size": size, "accumulate_grad_batches": accumulated, "max_steps": -1}
    resumed: dict[str, Any] = {"max_epochs": 2, "fit_options": {"ckpt_path": folder / "run.ckpt"}}
    fit(folder, "plain-effective", **plain, max_epochs=1)
    fit(folder, "plain-resumed", **plain, **resumed)
    planning.find = None  # it is not searched again
    callback = Rematerialization("periodic", margin=0.0, effective_batch_size=EFFECTIVE_BATCH_SIZE)
    fit(folder, "resumed", callback, max_steps=-1, **resumed)


def fit(
    folder: Path,
    kind: str,
    callback: Rematerialization | None = None,
    *,
    factory: Callable[[], Any] | None = None,
    batch_size: int = 8,
    fit_options: dict[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    """Trains, and writes what this rank saw."""
    module = seeded(Sharded, batch_size=batch_size) if factory is None else seeded(factory)
    callbacks = [] if callback is None else [callback]
    options = {"strategy": "ddp", "devices": 2, **options}
    trainer = run(folder, module, *callbacks, fit=fit_options, **options)
    found = {
        "sizes": module.sizes,
        "steps": trainer.global_step,
        "accumulated": trainer.accumulate_grad_batches,
        "parameters": digest(module.parameters()),
        "buffers": digest(module.buffers()),  # batch statistics: each rank's own
        "random": torch.rand(1).item(),
    }
    if callback is not None:
        result = callback.result
        assert result is not None
        found |= {
            "batch_size": result.batch_size,
            "schedule": str(result.plan.schedule),
            "budget_bytes": result.budget_bytes,
            "measured_peak_bytes": result.measured_peak_bytes,
            "num_recomputed": result.plan.num_recomputed,
            "parameter_bytes": sum(p.numel() * p.element_size() for p in module.parameters()),
            "correction_bytes": result.step.surroundings.correction_bytes,
            "resident_bytes": result.step.surroundings.resident_bytes,
        }
    (folder / f"{kind}-{trainer.global_rank}.json").write_text(json.dumps(found))
    return trainer


def digest(tensors: Iterable[torch.Tensor]) -> str:
    values = torch.cat([torch.zeros(0), *(t.detach().flatten().double() for t in tensors)])
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def trainer_rank() -> int:
    return torch.distributed.get_rank()


if __name__ == "__main__":
    run_ranks(2, partial(main, Path(sys.argv[1])))
