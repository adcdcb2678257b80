"""Compares one training step with and without the plan, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..batch_search.out_of_memory import is_out_of_memory
from ..batch_search.trial import install, uninstall
from ..step_planner import StepPlan
from .lightning_trial import LightningTrial


def find_difference(trial: LightningTrial, step: StepPlan, modules: Sequence[nn.Module]) -> str | None:
    """What a planned step does otherwise than the plain one; None if nothing. The plan stays installed.

    One batch of the loader's own size runs both ways: loss, gradients, weights after the optimizer, buffers and the
    random state that follows are compared.
    """
    size = trial.batch_size
    planned = trial.outcome(size)
    uninstall(modules)
    try:
        plain = trial.outcome(size)
    except BaseException as error:
        if not is_out_of_memory(error):
            raise
        return None  # what does not fit cannot be compared with
    finally:
        install(trial, trial.look_through(size), step)
    for name, value in plain.items():
        if name not in planned or not _same(value, planned[name]):
            return name
    return next((name for name in planned if name not in plain), None)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
