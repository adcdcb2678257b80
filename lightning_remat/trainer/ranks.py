"""What ranks tell each other, so that all decide the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from ..devices import HOST
from ..module_state.agreement import told_by_first

T = TypeVar("T")


def share(trainer: Trainer, compute: Callable[[], T], rank: int = 0) -> T:
    """What `compute` returns on one rank, on every rank; its error likewise."""
    if trainer.world_size == 1:
        return compute()
    broadcast = partial(trainer.strategy.broadcast, src=rank)
    return told_by_first(compute, broadcast, is_first=trainer.global_rank == rank)


def least(trainer: Trainer, value: int) -> int:
    """The least of the ranks' values."""
    return min(gathered(trainer, value))


def gathered(trainer: Trainer, value: int) -> list[int]:
    """The values of all ranks, in their order."""
    if trainer.world_size == 1:
        return [value]
    own = torch.tensor(value, dtype=torch.int64, device=trainer.strategy.root_device)
    values: Any = trainer.strategy.all_gather(own)
    return values.tolist()


class Agreement:
    """Lets ranks decide together in every step, without waiting for what their devices have to do.

    All make it together. Where the hosts have no network of their own, it goes over the devices', after their work.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._is_alone, self._device = trainer.world_size == 1, HOST
        self._group: Any = None
        if not self._is_alone:
            try:
                self._group = dist.new_group(backend="gloo")
            except RuntimeError as error:
                self._device = trainer.strategy.root_device
                rank_zero_info(f"Rematerialization lets ranks agree over their devices: {error}")

    def any(self, value: bool) -> bool:
        """Whether any rank says so."""
        if self._is_alone:
            return value
        told = torch.tensor(value, dtype=torch.uint8, device=self._device)
        dist.all_reduce(told, dist.ReduceOp.MAX, self._group)
        return bool(told)

    def all(self, value: T) -> list[T]:
        """What each rank says, in their order."""
        if self._is_alone:
            return [value]
        told: list[Any] = [None] * dist.get_world_size(self._group)
        cast(Any, dist).all_gather_object(told, value, self._group)
        return told

    def close(self) -> None:
        """Lets go of the connections."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
