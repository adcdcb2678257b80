"""Compares steps by a new plan with plain ones, before training takes the first: several, as they come later too."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

from ..batch_search.settings import Settings
from ..batch_search.trial import uninstall
from ..devices import HOST, random_state
from ..execution.rewriter import programs_in
from ..measure.device_memory import device_memory
from ..module_state.nesting import tensors_in
from ..module_state.sharding import has_units
from ..operations.saved_tensors import version_of
from ..regions.self_check import Compared, Outcome, compared, find_difference, fingerprint
from ..reports.result import Result
from .lightning_step import LightningTrial
from .private_api import run_optimization

logger = logging.getLogger(__name__)

SLICES = (4, 16)
"""Samples of the batch on which steps are compared: what is captured of convolutions may ask for the larger one."""


@dataclass(frozen=True, slots=True)
class Variation:
    """What another step finds otherwise than the next one.

    Attributes:
        when: Which step that is.
        seed: Of all random numbers; None for those that come next.
        num_steps: How many optimizer steps and batches later it is.
        num_epochs: How many epochs later.
        in_eval: Whether dropout and batch norm are in eval mode, as in a network that is frozen in part.
    """

    when: str
    seed: int | None = None
    num_steps: int = 0
    num_epochs: int = 0
    in_eval: bool = False


NEXT = Variation("")
LATER = (
    Variation("later in the epoch", seed=1, num_steps=1),
    Variation("of the next epoch", seed=2, num_steps=100, num_epochs=1),
    Variation("with dropout and batch norm in eval mode", seed=3, in_eval=True),
)


def passes_check(
    trial: LightningTrial,
    settings: Settings,
    result: Result,
    modules: list[nn.Module],
    leave_alone: Callable[[str], None],
) -> bool:
    """Whether planned steps give what plain ones give; asked where wanted, and of steps that differentiate.

    Where they do not, the modules are as before.
    """
    if not (settings.self_check or trial.differentiates) or not programs_in(trial.trainer.lightning_module):
        return True
    start = time.perf_counter()
    found = _compared(trial, settings, result)
    if found is None:
        logger.info("no planned step was compared with the plain one, which does not fit or cannot be repeated")
        return True
    logger.info("planned steps were compared with plain ones in %.2f seconds", time.perf_counter() - start)
    if not found.differs:
        return True
    uninstall(modules)
    leave_alone(str(found.difference or "another rank's results differ"))
    return False


def _compared(trial: LightningTrial, settings: Settings, result: Result) -> Compared | None:
    """The first step that differs, or the last one; None if none could be compared."""
    module = trial.trainer.lightning_module
    if has_units(module):  # all processes run these steps together, so that none may capture less than another
        if not _fits(trial, result, trial.batch_size):
            return None
        difference = find_difference(module, partial(outcome, trial, trial.batch_size))
        return Compared(True, difference, trial.least(int(difference is None)) == 0)
    # Another size may ask for a capture of its own, which training would not have had: that runs as it is.
    with torch.compiler.set_stance("eager_on_recompile"):
        for size in _sizes(trial, settings, result):
            found = compared(module, partial(outcome, trial, size), agree=trial.least)
            if found.by_plan or found.differs:
                break
        else:
            return None
        for variation in LATER:
            if found.differs:
                break
            found = compared(module, partial(outcome, trial, size, variation), when=variation.when, agree=trial.least)
    return found


def _sizes(trial: LightningTrial, settings: Settings, result: Result) -> list[int]:
    """The slices of the batch to compare steps on, and all of it in case that none will do; those that fit."""
    whole, unit = trial.batch_size, settings.multiple_of
    slices = [-(-size // unit) * unit for size in SLICES] if trial.has_batch_dimension else []
    return [size for size in (*(s for s in slices if s < whole), whole) if _fits(trial, result, size)]


def _fits(trial: LightningTrial, result: Result, size: int) -> bool:
    """Whether every rank has memory for a plain step of that many samples.

    It needs as much as the planned step of a whole batch, and its part of what the plain one needs beyond.
    """
    planned = result.measured_peak_bytes or result.predicted_peak_bytes
    beyond = max(0, result.plain_peak_bytes - planned) * size // result.batch_size
    free = device_memory(trial.device).free_bytes + trial.alive_bytes()
    return trial.least(int(planned + beyond <= free)) == 1


def outcome(trial: LightningTrial, batch_size: int, variation: Variation = NEXT) -> Outcome:
    """All that a training step produces up to its optimizer; undone afterwards."""
    trainer, module = trial.trainer, trial.trainer.lightning_module
    with trial.undone():
        _vary(trainer, variation)
        versions = {name: version_of(p) for name, p in module.named_parameters()}
        batch, index = trial.batch_of(batch_size), trial.batch_idx + variation.num_steps
        loss = run_optimization(trainer, batch, index, with_optimizer=False)
        found = {f"loss {i}": t for i, t in enumerate(tensors_in(loss))}
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad
            if version_of(parameter) != versions.get(name):  # a teacher that follows in the forward, say
                found[f"parameter {name}"] = parameter
        found |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
        found |= {f"random state of {device}": random_state(device) for device in {HOST, trial.device}}
        return {name: fingerprint(t) for name, t in found.items()}


def _vary(trainer: Trainer, variation: Variation) -> None:
    """Lets the trainer and its module be as another step finds them."""
    if variation.seed is not None:
        random.seed(variation.seed)
        np.random.seed(variation.seed)  # noqa: NPY002
        torch.manual_seed(variation.seed)  # pyright: ignore[reportUnknownMemberType]
    loop = trainer.fit_loop
    loop.epoch_progress.current.completed += variation.num_epochs
    loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed += variation.num_steps
    loop.epoch_loop.manual_optimization.optim_step_progress.total.completed += variation.num_steps
    for progress in (loop.epoch_loop.batch_progress.current, loop.epoch_loop.batch_progress.total):
        progress.ready += variation.num_steps
    if variation.in_eval:
        for m in trainer.lightning_module.modules():
            if isinstance(m, (_NormBase, _DropoutNd)):
                m.training = False
