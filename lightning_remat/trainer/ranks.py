"""What ranks tell each other, so that all decide the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import Trainer

T = TypeVar("T")


def share(trainer: Trainer, compute: Callable[[], T]) -> T:
    """What `compute` returns on rank 0, on every rank; its error likewise."""
    if trainer.world_size == 1:
        return compute()
    outcome: tuple[T | None, Exception | None] = (None, None)
    if trainer.is_global_zero:
        try:
            outcome = compute(), None
        except Exception as error:  # raised below, on every rank
            outcome = None, error
    value, error = trainer.strategy.broadcast(outcome, src=0)
    if error is not None:
        raise error
    return cast(T, value)


def least(trainer: Trainer, value: int) -> int:
    """The least of the ranks' values."""
    if trainer.world_size == 1:
        return value
    own = torch.tensor(value, dtype=torch.int64, device=trainer.strategy.root_device)
    values: Any = trainer.strategy.all_gather(own)
    return int(values.min())
