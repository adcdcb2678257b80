"""One rank of distributed runs on the CPU, started by test_callback_ddp.py; writes what it saw to files."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from remat_runs import Classifier, Images, run, seeded
from torch.utils.data import DataLoader

import lightning_remat.batch_size as batch_size
from lightning_remat import Rematerialization
from lightning_remat.device_memory import DeviceMemory


class Sharded(Classifier):
    """Enough data that memory is the limit."""

    def train_dataloader(self) -> DataLoader[object]:
        return DataLoader(Images(400), batch_size=self.batch_size, shuffle=True)


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for kind in ("plain", "keep", "search"):  # by one process a rank, whose start takes longer than the runs
        fit(folder, kind)


def fit(folder: Path, kind: str) -> None:
    module = seeded(Sharded)
    callbacks = []
    if kind == "search":
        # The ranks do not have the same memory: rank 1 has less.
        free = {"0": 48 * 2**20, "1": 16 * 2**20}
        callbacks = [Rematerialization("periodic", margin=0.0)]
        alive = sum(t.untyped_storage().nbytes() for t in [*module.parameters(), *module.buffers()])
        batch_size.device_memory = lambda device: DeviceMemory(free[str(trainer_rank())] - alive, 2**30)
    elif kind == "keep":
        callbacks = [Rematerialization("periodic", memory_budget="80%", batch_size="keep")]
    trainer = run(folder, module, *callbacks, strategy="ddp", devices=2, max_steps=4)
    found = {
        "sizes": module.sizes,
        "parameters": digest(module.parameters()),
        "buffers": digest(module.buffers()),  # batch statistics: each rank's own
        "random": torch.rand(1).item(),
    }
    if callbacks:
        result = callbacks[0].result
        assert result is not None
        found |= {
            "batch_size": result.batch_size,
            "schedule": str(result.plan.schedule),
            "budget_bytes": result.budget_bytes,
            "measured_peak_bytes": result.measured_peak_bytes,
            "num_recomputed": result.plan.num_recomputed,
        }
    (folder / f"{kind}-{trainer.global_rank}.json").write_text(json.dumps(found))


def digest(tensors: Iterable[torch.Tensor]) -> str:
    values = torch.cat([t.detach().flatten().double() for t in tensors])
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def trainer_rank() -> int:
    return torch.distributed.get_rank()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
