"""The buckets in which DDP gathers gradients: a second copy of them, or where they live."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..budget import format_bytes
from ..measure.tensor_bytes import logical_bytes


class Buckets(NamedTuple):
    """What DDP holds of the gradients, from before the first step on.

    Attributes:
        num_bytes: Of all buckets: those of all gradients.
        hold_gradients: Whether the gradients are views into them, so that their memory never goes.
    """

    num_bytes: int
    hold_gradients: bool

    @property
    def copy_bytes(self) -> int:
        """What they take beside the gradients themselves."""
        return 0 if self.hold_gradients else self.num_bytes


def buckets_of(trainer: Trainer) -> Buckets:
    """The buckets of the trainer's model; none where it is not under DDP."""
    model: Any = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return Buckets(0, False)
    ddp: Any = cast(Any, model)
    parameters: list[tuple[str, nn.Parameter]] = list(ddp.module.named_parameters())
    reduced = [p for name, p in parameters if p.requires_grad and name not in ddp.parameters_to_ignore]
    return Buckets(logical_bytes(reduced), bool(ddp.gradient_as_bucket_view))


def tell_of_buckets(trainer: Trainer) -> None:
    """Says what the second copy costs, and how to do without."""
    if copy_bytes := buckets_of(trainer).copy_bytes:
        rank_zero_info(
            f"Rematerialization: DDP holds the gradients twice, in buckets of {format_bytes(copy_bytes)} on each rank, "
            "which count in the budget; DDPStrategy(gradient_as_bucket_view=True) holds them once"
        )
