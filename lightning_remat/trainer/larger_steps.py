"""Steps that need more than the one that was planned for are planned anew, to stay within the budget: those of larger
batches, and those in which more of the model is trained."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from ..batch_search.search import find
from ..batch_search.settings import Settings
from ..batch_search.trial import uninstall
from ..budget import format_bytes
from ..errors import InfeasibleBudgetError, TraceError
from ..execution.compiling import StretchCompiler
from ..execution.rewriter import Rewriting, compile_programs
from ..measure.out_of_memory import is_out_of_memory
from ..measure.tensor_bytes import storage_bytes
from ..module_state.batches import tensors_held
from ..regions.look_through import NoCallError
from ..reports.result import Result
from .lightning_step import LightningTrial, StepFailedError
from .ranks import Agreement
from .step_check import passes_check

_MOST_PLANS = 8
"""That are made for larger and larger batches."""

_ROOM, _MOST_ROOM = 0.1, 0.3
"""The part of the budget that a plan made anew leaves to batches that are larger still; each next one leaves more."""

_POWER = 2
"""With which a step's memory grows at most: attention holds a number for each pair of positions."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """How large a batch is: its elements, and by the number of dimensions the largest extent of each."""

    num_elements: int
    extents: dict[int, tuple[int, ...]]

    @classmethod
    def of(cls, batch: Any) -> _Sizes:
        extents: dict[int, tuple[int, ...]] = {}
        tensors = tensors_held(batch)
        for t in tensors:
            extents[t.dim()] = tuple(map(max, extents.get(t.dim(), t.shape), t.shape))
        return cls(sum(t.numel() for t in tensors), extents)

    def over(self, other: _Sizes) -> float:
        """By how much it is larger in what it is larger most."""
        extents = (
            a / max(1, b)
            for n, own in self.extents.items()
            for a, b in zip(own, other.extents.get(n, own), strict=True)
        )
        return max(self.num_elements / max(1, other.num_elements), *extents, 1.0)


@dataclass(frozen=True, slots=True)
class _Weights:
    """Bytes of the parameters that are trained, and of all."""

    trained: int
    all: int

    @classmethod
    def of(cls, module: nn.Module) -> _Weights:
        sizes = [(p.numel() * p.itemsize, p.requires_grad) for p in module.parameters()]
        return cls(sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes))

    def exceeds(self, other: _Weights) -> bool:
        return self.trained > other.trained or self.all > other.all


class LargerSteps:
    """Plans a step anew before a batch with which the plan may exceed the budget.

    Where texts, sounds, images or graphs are of several sizes, batches are. That of the first step was planned for; the
    plan serves for all for which the step cannot need more than the budget, as it grows at most with the square of what
    grows. A larger one is planned and checked like the first, with some room for what comes; where its least peak is
    above the budget it gets that, and a warning tells. No step is planned anew for a smaller one. So is the first step
    in which more is trained than before: layers that are no longer frozen, that are new, or of a larger type.

    With several devices all plan as soon as one of them has to; every rank makes and closes this list.

    Args:
        trainer: Whose step was planned.
        settings: Of the callback.
        result: The plan for the first batch.
        modules: The rewritten submodules, which this list goes on to hold.
        batch: The first one.
        leave_alone: Is told why the plain model is trained from now on.

    Attributes:
        is_over: Whether nothing is planned anew any more, of which a warning has told.
    """

    def __init__(
        self,
        trainer: Trainer,
        settings: Settings,
        result: Result,
        modules: list[nn.Module],
        batch: Any,
        leave_alone: Callable[[str], None],
    ) -> None:
        self.trainer, self.modules, self._leave_alone = trainer, modules, leave_alone
        self._asked = settings.memory_budget
        if isinstance(settings.memory_budget, str):  # "70%" is of the first step, as long as the model is the same
            settings = replace(settings, memory_budget=result.budget_bytes)
        self.settings = replace(settings, batch_size="keep")
        self.budget_bytes = result.budget_bytes
        module = trainer.lightning_module
        self._held_bytes = storage_bytes([*module.parameters(), *module.buffers()])
        self._note_weights()
        self._ranks = Agreement(trainer)
        self._known = [(sizes, _peak_of(result)) for sizes in self._ranks.all(_Sizes.of(batch))]
        self._num_plans = 0
        self.is_over = False

    def close(self) -> None:
        """Ends the agreement of the ranks."""
        self._ranks.close()

    def is_too_large(self, batch: Any, batch_idx: int) -> bool:
        """Whether a step of this batch may exceed the budget by the present plan, on any device."""
        return not self.is_over and self._ranks.any(self._has_grown(batch_idx) or self._may_exceed(_Sizes.of(batch)))

    def _may_exceed(self, sizes: _Sizes) -> bool:
        return all(self._exceeds(sizes.over(known), peak) for known, peak in self._known)

    def _note_weights(self) -> None:
        module = self.trainer.lightning_module
        self._weights, self._parameters = _Weights.of(module), list(map(weakref.ref, module.parameters()))
        self._were_trained = self._are_trained()

    def _are_trained(self) -> list[bool]:
        return [p.requires_grad for known in self._parameters if (p := known()) is not None]

    def _has_grown(self, batch_idx: int) -> bool:
        """Whether the model has more parameters than the plan is for, or trains more of them.

        New ones and other types are looked for as an epoch begins alone: to list parameters takes its time.
        """
        if batch_idx and self._are_trained() == self._were_trained:
            return False
        return _Weights.of(self.trainer.lightning_module).exceeds(self._weights)

    def _exceeds(self, growth: float, peak_bytes: int) -> bool:
        beyond = peak_bytes - self._held_bytes
        return growth > 1 and self._held_bytes + beyond * growth**_POWER > self.budget_bytes

    def plan(self, batch: Any, batch_idx: int) -> Result | None:
        """The plan for this batch, which is in force now; None where it stays as it was, or the plain model is left."""
        if self._num_plans == _MOST_PLANS:
            self.is_over = True
            rank_zero_warn(
                f"Rematerialization has planned anew {_MOST_PLANS} times, for larger and larger batches or as more was "
                "trained, and does so no more: steps may exceed the budget. Remedy: train on the largest batch first"
            )
            return None
        self._num_plans += 1
        module = self.trainer.lightning_module
        has_grown = self._has_grown(batch_idx)
        why = "as more is trained" if has_grown else "for a larger batch"
        if has_grown and isinstance(self._asked, str):
            self.settings = replace(self.settings, memory_budget=self._asked)
        before = Rewriting(module)
        uninstall(self.modules)
        trial = LightningTrial(self.trainer, self.settings, batch, batch_idx, with_optimizer=False)
        try:
            result, modules = self._found(trial)
            is_exact = passes_check(trial, self.settings, result, modules, self._leave_alone)
        except Exception as error:
            before.put_back()
            is_told_by_all = isinstance(error, StepFailedError | TraceError | NoCallError)
            if not (is_told_by_all or (is_out_of_memory(error) and self.trainer.world_size == 1)):
                raise  # with several devices others may wait for this one
            self.is_over = True
            rank_zero_warn(
                f"Rematerialization cannot plan anew {why}, and the step may exceed the budget: "
                f"{error.__cause__ or error!r}"
            )
            return None
        finally:
            trial.close()
        self.modules[:] = modules
        if not is_exact:
            self.is_over = True
            return None
        if self.settings.compile_stretches:
            compile_programs(modules, StretchCompiler())
        if has_grown:
            self._known.clear()  # what was known is of another model
            self._note_weights()
            self._held_bytes = storage_bytes([*module.parameters(), *module.buffers()])
            if isinstance(self.settings.memory_budget, str):
                self.budget_bytes = result.budget_bytes
                self.settings = replace(self.settings, memory_budget=self.budget_bytes)
        self._known += [(sizes, _peak_of(result)) for sizes in self._ranks.all(_Sizes.of(batch))]
        rank_zero_info(
            f"Rematerialization plans anew {why}: {format_bytes(_peak_of(result))}, recompute overhead "
            f"{result.recompute_overhead:.1%}"
        )
        return replace(result, budget_bytes=max(result.budget_bytes, self.budget_bytes))

    def _found(self, trial: LightningTrial) -> tuple[Result, list[nn.Module]]:
        used = 1 - min(_ROOM * self._num_plans, _MOST_ROOM)
        roomy = self._with_room(used)
        infeasible: InfeasibleBudgetError | None = None
        for settings in (roomy,) if roomy == self.settings else (roomy, self.settings):  # it may fit without any
            budget = None if infeasible is None else infeasible.budget_bytes
            if infeasible is None or budget is None or used * infeasible.minimum_bytes <= budget:
                try:
                    return find(trial, settings)
                except InfeasibleBudgetError as error:
                    infeasible = error.with_traceback(None)
        self.is_over = True  # what is larger still cannot fit either
        rank_zero_warn(f"a step needs more than those planned for, and gets the lowest peak: {infeasible}")
        return find(trial, self.settings, lowest=True)

    def _with_room(self, used: float) -> Settings:
        """The settings with a part of their budget, unless that is a part of what the step needs."""
        if isinstance(self.settings.memory_budget, str):
            return self.settings
        if self.settings.counts_scratch:  # the budget is what is free, less a margin
            return replace(self.settings, margin=1 - used * (1 - self.settings.margin))
        return replace(self.settings, memory_budget=int(used * self.budget_bytes))


def _peak_of(result: Result) -> int:
    return max(result.measured_peak_bytes or 0, result.predicted_peak_bytes)
