"""Executes a choice in real steps, and tells what these needed beyond what was predicted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from ..devices import counts_memory, empty_cache
from ..errors import MismatchError
from ..execution.rewriter import num_profiled
from ..measure.out_of_memory import is_out_of_memory
from ..measure.tensor_bytes import storage_bytes
from ..plans.plan import StepPlan
from ..plans.reserved import Reservation
from .candidates import Choice
from .settings import Settings
from .trial import ELSEWHERE, STEPS_PER_TRIAL, Trial, install, uninstall


class Executed(NamedTuple):
    """The rewritten modules, and the most that any rank measured: None, of none, if one ran out of memory."""

    modules: list[nn.Module]
    measured: int | None
    num_steps: int


def execute(trial: Trial, choice: Choice, settings: Settings) -> Executed:
    """Rewrites the modules and runs steps; once more where graphs that were new in the first were profiled in them.

    Where all counts that the device must have, it may take no more than the budget meanwhile.
    """
    size, modules = choice.batch_size, list[nn.Module]()

    def rewrite() -> int:
        modules.extend(install(trial, size, choice.step, settings.planner))
        return 0

    def measure() -> int:
        return trial.measure(size, with_scratch=settings.counts_scratch)

    trial.within = choice.budget_bytes if settings.counts_scratch else None
    num_steps = STEPS_PER_TRIAL
    try:
        # Before steps are run together, all know that all are rewritten.
        measured = None if _most(trial, rewrite) is None else _most(trial, measure)
        if measured is not None and trial.least(-num_profiled(modules)):
            measured = _most(trial, measure)
            num_steps += STEPS_PER_TRIAL
    except BaseException:
        uninstall(modules)
        raise
    finally:
        trial.within = None
    if measured is not None:
        return Executed(modules, measured, num_steps)
    uninstall(modules)
    gc.collect()
    empty_cache(trial.device)
    return Executed([], None, num_steps)


def _most(trial: Trial, measure: Callable[[], int]) -> int | None:
    """The most that any rank measures; None, of none, if one runs out of memory.

    Raises:
        MismatchError: A rank calls something else than the plan is for.
    """
    measured, mismatch = None, None
    try:
        measured = measure()
    except MismatchError as error:
        mismatch = error
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    least = trial.least(-1 if mismatch is not None else int(measured is not None))
    if least < 0:
        raise mismatch or MismatchError(ELSEWHERE)
    return -trial.least(-measured) if least and measured is not None else None


def reservation(trial: Trial, step: StepPlan) -> Reservation:
    """What a device's allocator does in the step."""
    held = (*trial.module.parameters(), *trial.module.buffers())
    return Reservation.of(step, tuple(storage_bytes([t]) for t in held))


def reserved_bytes(trial: Trial, step: StepPlan) -> int:
    """What it reserves for the step at most, if nothing limits it."""
    return reservation(trial, step).within().most_reserved_bytes


def excess_of(trial: Trial, settings: Settings, step: StepPlan, measured: int) -> int:
    """What was measured beyond what is predicted: on a device it has gaps in it, which are predicted by themselves."""
    predicted = most = max(step.timeline.memory_bytes)
    if settings.counts_scratch and counts_memory(trial.device):
        most = max(predicted, reserved_bytes(trial, step))
    return max(measured - most, min(0, measured - predicted))
