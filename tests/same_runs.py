"""A run with the callback beside the run without it: everything that training leaves behind, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from remat_runs import run
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_remat import Rematerialization
from lightning_remat.regions.self_check import fingerprint

WIDTH, BATCH = 16, 64


def deep(width: int = WIDTH, depth: int = 6) -> nn.Sequential:
    """Quick, and deep enough that something is recomputed; draws random numbers, has buffers."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.BatchNorm1d(width))


def samples(count: int = 4 * BATCH) -> TensorDataset:
    return TensorDataset(torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(5)))


class Deep(LightningModule):
    """Trains the network; what a test adds it adds in a subclass."""

    batch_size = BATCH

    def __init__(self) -> None:
        super().__init__()
        self.net = deep()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=self.batch_size, shuffle=True)


class Manual(Deep):
    """Optimizes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch[0]).square().mean())
        optimizer.step()


def remat(**options: Any) -> Rematerialization:
    return Rematerialization(**{"planner": "periodic", "memory_budget": "80%", "batch_size": "keep", **options})


class _Ends(Callback):
    """What is there when training ends."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.found = {
            "randoms": (random.random(), float(np.random.random()), torch.rand(3)),  # noqa: NPY002
            "random of the device": torch.rand(3, device=pl_module.device),
            "metrics": dict(trainer.callback_metrics),
            "counts": (trainer.global_step, trainer.current_epoch, trainer.should_stop, trainer.num_training_batches),
            "optimizers": [o.state_dict() for o in trainer.optimizers],
            "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        }


def assert_same_run(
    root: Path,
    factory: Callable[[], LightningModule] = Deep,
    *,
    callbacks: Callable[[], Sequence[Callback]] = tuple,
    callback: Rematerialization | None = None,
    fit: Callable[[LightningModule], dict[str, Any]] | None = None,
    is_planned: bool | None = True,
    where: Callable[[], dict[str, Any]] = dict,
    **options: Any,
) -> Rematerialization:
    """Trains without and with the callback, and compares all that is left.

    Args:
        root: Where the runs may write.
        factory: Makes the module.
        callbacks: Makes the other callbacks; they come after ours.
        callback: Ours, if not the usual one.
        fit: The arguments of `fit`.
        is_planned: Whether something must be recomputed; None: whatever is.
        where: Makes the options of the Trainer that say on which device.
        **options: Of the Trainer.
    """
    callback = remat() if callback is None else callback
    found: list[dict[str, Any]] = []
    for kind, ours in (("plain", []), ("planned", [callback])):
        seed_everything(3, verbose=False)
        module, ends = factory(), _Ends()
        folder = root / kind
        given = None if fit is None else fit(module)
        trainer = run(folder, module, *ours, *callbacks(), ends, fit=given, **where(), **options)
        assert "forward" not in vars(module)
        found.append(
            {
                "state": module.state_dict(),
                "gradients": {n: p.grad for n, p in module.named_parameters()},
                "seen": getattr(module, "seen", None),
                "average": [c._average_model.state_dict() for c in trainer.callbacks if hasattr(c, "_average_model")],  # pyright: ignore
                **ends.found,
            }
        )
    plain, planned = found
    different = differences(plain, planned)
    assert not different, different[:8]
    if is_planned is not None:
        recomputed = 0 if callback.result is None else callback.result.step.num_recomputed
        assert (recomputed > 0) == is_planned
    return callback


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two nested values differ, bit by bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return [] if fingerprint(a) == fingerprint(b) else [path]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [d for k in a for d in differences(a[k], b[k], f"{path}.{k}")]
    if isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}.{i}")]
    return [] if a is b or bool(a == b) else [f"{path}: {a!r:.60} {b!r:.60}"]
