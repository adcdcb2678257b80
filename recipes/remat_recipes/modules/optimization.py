"""Optimizer and learning-rate schedule from two factories, the same for every recipe."""

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[..., LRScheduler]


def configure(module: LightningModule, optimizer: OptimizerFactory, scheduler: SchedulerFactory | None) -> Any:
    """What `configure_optimizers` returns: the optimizer, and a schedule over the whole run, advanced every step.

    Args:
        module: whose parameters are trained.
        optimizer: parameters -> optimizer.
        scheduler: `(optimizer, total_steps=)` -> schedule; `None` for a constant learning rate.
    """
    made = optimizer(module.parameters())
    if scheduler is None:
        return made
    total_steps = int(module.trainer.estimated_stepping_batches)
    return {
        "optimizer": made,
        "lr_scheduler": {"scheduler": scheduler(made, total_steps=total_steps), "interval": "step"},
    }
