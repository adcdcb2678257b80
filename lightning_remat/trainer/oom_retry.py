"""`on_oom="replan"`: a step that runs out of memory is undone, planned for its own batch, and run once more.

A validation step has no plan: it is run once more in memory that is in one piece again, without old gradients.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from ..batch_search.settings import Settings
from ..batch_search.trial import install, model_step, uninstall, with_apart
from ..budget import format_bytes
from ..devices import empty_cache
from ..errors import InfeasibleBudgetError
from ..execution.compiling import StretchCompiler
from ..execution.rewriter import compile_programs
from ..measure.out_of_memory import is_out_of_memory
from ..module_state.preserve import record
from ..module_state.random_state import RandomState
from ..plans.plan import StepPlan
from ..reports.result import Result
from .lightning_step import LightningTrial
from .private_api import logged_results

_TIGHTER = 0.95


class StepRetry:
    """Wraps the steps of a run; at most one of them in training is retried.

    A step is undone only as far as its results need: random states, buffers, plain attributes, metrics and what was
    logged, and gradients where several batches are summed. Weights and optimizer state change after the step alone.

    Args:
        trainer: On one device, with automatic optimization.
        settings: Of the callback.
        result: The plan in force.
        modules: The rewritten submodules.
        adopt: Is told of the tighter plan.
    """

    def __init__(
        self,
        trainer: Trainer,
        settings: Settings,
        result: Result,
        modules: list[nn.Module],
        adopt: Callable[[Result], None],
    ) -> None:
        self.trainer, self.settings, self.result, self.modules = trainer, settings, result, modules
        self._adopt = adopt
        self.has_retried = False

    def __call__(self, step: Callable[[], Any], batch: Any, batch_idx: int, is_accumulating: bool) -> Any:
        """The step's result, of the second attempt if the first ran out of memory."""
        if self.has_retried:
            return step()
        made, first = self._attempted(step, records_gradients=is_accumulating, keeps_gradients=is_accumulating)
        if first is None:
            return made
        self.has_retried = True
        try:
            plan = self._replan(batch, batch_idx)
        except ValueError as error:  # no tighter plan: the first error stands
            first.add_note(f"No tighter plan for this batch: {error}")
            raise first from None
        rank_zero_warn(
            f"a training step ran out of memory and is run again by a tighter plan: {format_bytes(plan.budget_bytes)}, "
            f"recompute overhead {plan.recompute_overhead:.1%} (was {self.result.recompute_overhead:.1%}): {first}"
        )
        self._adopt(replace(self.result, step=plan, budget_bytes=plan.budget_bytes, measured_peak_bytes=None))
        return step()

    def validated(self, step: Callable[[], Any]) -> Any:
        """The result of a validation step, of the second attempt if the first ran out of memory.

        It is the first one's: what a step has drawn, logged and counted is undone. Gradients of the last training step
        go, which the next one would drop, unless several batches are summed.
        """
        is_summing = self.trainer.accumulate_grad_batches > 1
        made, first = self._attempted(step, records_gradients=False, keeps_gradients=is_summing)
        if first is None:
            return made
        rank_zero_warn(f"a validation step ran out of memory and is run again in memory that was made free: {first}")
        return step()

    def _attempted(
        self, step: Callable[[], Any], *, records_gradients: bool, keeps_gradients: bool
    ) -> tuple[Any, BaseException | None]:
        """The step's result; or that memory ran out: then it is undone, and what it does not need has gone."""
        module = self.trainer.lightning_module
        undo = record([module, *logged_results(self.trainer)], with_parameters=False, with_gradients=records_gradients)
        undo_random = RandomState.of_all().put_back
        try:
            return step(), None
        except BaseException as error:
            first = _exhausted(error)
        undo()
        undo_random()
        if not keeps_gradients:
            for parameter in module.parameters():
                parameter.grad = None
        gc.collect()
        empty_cache(self.trainer.strategy.root_device)
        return None, first

    def _replan(self, batch: Any, batch_idx: int) -> StepPlan:
        uninstall(self.modules)
        with closing(LightningTrial(self.trainer, self.settings, batch, batch_idx)) as trial:
            model = model_step(trial, [trial.batch_size], with_scratch=self.settings.counts_scratch)
            known = self.result.step.surroundings.correction_bytes
            model = model.corrected(max(0, known), trial.batch_size)
            budget = int(self.result.budget_bytes * _TIGHTER)
            try:
                plan = model.plan(trial.batch_size, budget, self.settings.planner)
            except InfeasibleBudgetError:
                model = with_apart(trial, model, with_scratch=self.settings.counts_scratch)
                plan = model.plan(trial.batch_size, budget, self.settings.planner)
            # The callback restores what this list holds.
            self.modules[:] = install(trial, trial.batch_size, plan, self.settings.planner)
        if self.settings.compile_stretches:
            compile_programs(self.modules, StretchCompiler())
        return plan


def _exhausted(error: BaseException) -> BaseException:
    """An error that says that memory ran out, and holds none any more; another one is raised again."""
    if not is_out_of_memory(error):
        raise error
    traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
    return error
