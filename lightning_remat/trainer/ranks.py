"""What ranks tell each other, so that all decide the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from lightning.pytorch import Trainer

from ..module_state.agreement import told_by_first

T = TypeVar("T")


def share(trainer: Trainer, compute: Callable[[], T]) -> T:
    """What `compute` returns on rank 0, on every rank; its error likewise."""
    if trainer.world_size == 1:
        return compute()
    return told_by_first(compute, trainer.strategy.broadcast, is_first=trainer.is_global_zero)


def least(trainer: Trainer, value: int) -> int:
    """The least of the ranks' values."""
    if trainer.world_size == 1:
        return value
    own = torch.tensor(value, dtype=torch.int64, device=trainer.strategy.root_device)
    values: Any = trainer.strategy.all_gather(own)
    return int(values.min())
