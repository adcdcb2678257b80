"""Search over batch size × schedule: planned sizes first, and only what was executed is returned."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import nn

from .budget import format_bytes, parse_budget
from .device_memory import device_memory
from .errors import InfeasibleBudgetError
from .out_of_memory import is_out_of_memory, is_too_small_for_batch_norm
from .regions import Call
from .result import Candidate, Result
from .settings import Settings
from .step_planner import StepPlan, plain_timeline, plan_step
from .trial import STEPS_PER_TRIAL, StepModel, Trial, install, model_step, uninstall

logger = logging.getLogger(__name__)

MOST_STEPS = 6
"""Real training steps that a search runs at most."""

_LARGEST_PROFILE = 32
_LARGEST_SIZE = 1 << 20
_NUM_THROUGHPUT_SIZES = 12
_OUT_OF_MEMORY = 1 << 62


class Choice(NamedTuple):
    """What a search proposes to execute."""

    batch_size: int
    reason: str
    step: StepPlan
    budget_bytes: int
    candidates: tuple[Candidate, ...]


@dataclass(slots=True)
class _Search:
    """What a search knows: the model of the step, the budget and what was planned so far."""

    trial: Trial
    settings: Settings
    sizes: Sequence[int]
    model: StepModel
    free_bytes: int
    total_bytes: int
    tight: float = 1.0  # part of the budget that is planned for
    trials: dict[int, Candidate] = field(default_factory=dict[int, Candidate])
    steps: dict[int, StepPlan] = field(default_factory=dict[int, StepPlan])
    error: InfeasibleBudgetError | None = None

    def plain_peak(self, size: int) -> int:
        return plain_timeline(self.model.keys, self.model.graphs_at(size), self.model.surroundings_at(size)).peak_bytes

    def budget(self, size: int) -> int:
        """The budget of the step in bytes; a percentage is of the plain step as the loader has it."""
        wanted, margin = self.settings.memory_budget, self.settings.margin
        if wanted is None:
            return int(self.free_bytes * (1 - margin))  # what is alive already is in the budget, and counted as free
        if isinstance(wanted, float):
            return parse_budget(wanted, plain_peak_bytes=0, device_bytes=int(self.total_bytes * (1 - margin)))
        plain = self.plain_peak(size if len(self.sizes) == 1 else self.trial.batch_size)
        return parse_budget(wanted, plain_peak_bytes=plain, device_bytes=0)

    def fits(self, size: int) -> bool:
        """Plans for a batch size, once for each state of the model."""
        if size in self.trials:
            return self.trials[size].fits
        graphs, around = self.model.graphs_at(size), self.model.surroundings_at(size)
        plain = plain_timeline(self.model.keys, graphs, around)
        plain_rate = size / max(sum(plain.seconds), 1e-12)
        try:
            budget = self.budget(size)
            step = plan_step(self.model.keys, graphs, int(budget * self.tight), self.settings.planner, around)
        except InfeasibleBudgetError as error:
            self.error = error
            reason = f"needs {format_bytes(error.minimum_bytes)}"
            self.trials[size] = Candidate(
                size, plain.peak_bytes, int(error.minimum_bytes), None, None, plain_rate, False, reason
            )
            return False
        overhead = step.recompute_overhead
        limit = self.settings.max_overhead
        fits = limit is None or overhead <= limit
        reason = "" if fits else f"overhead above {limit:.0%}"
        rate = size / max(step.seconds, 1e-12)
        self.trials[size] = Candidate(
            size, plain.peak_bytes, step.predicted_peak_bytes, overhead, rate, plain_rate, fits, reason
        )
        self.steps[size] = step
        return fits

    def correct(self, excess_bytes: int, size: int) -> None:
        """The model learns from a measured step; what was planned by the old one is stale."""
        self.model = self.model.corrected(excess_bytes, size)
        self.trials, self.steps = {}, {}

    def tighten(self) -> None:
        """A step ran out of memory; by how much is not known."""
        self.tight *= 0.9
        self.trials, self.steps = {}, {}

    def choose(self) -> Choice:
        """The best size that fits, with its plan.

        Raises:
            InfeasibleBudgetError: None fits.
        """
        size, reason = self._choose()
        return Choice(size, reason, self.steps[size], self.budget(size), tuple(self.trials.values()))

    def _choose(self) -> tuple[int, str]:
        largest = self._largest()
        if largest is None:
            raise self._nothing_fits()
        top = self.sizes[largest]
        if len(self.sizes) == 1:
            return top, "given"
        if self.settings.objective == "throughput":
            return self._fastest(largest)
        if largest + 1 == len(self.sizes):
            return top, f"{top} is the largest size allowed, and it fits"
        after = self.trials[self.sizes[largest + 1]]
        return top, f"{top} is the largest size that fits: {after.batch_size} {after.reason}"

    def _largest(self) -> int | None:
        """Index of the largest size that fits, found by doubling from the loader's size and then halving."""
        last = len(self.sizes) - 1
        start = next((i for i, s in enumerate(self.sizes) if s >= self.trial.batch_size), last)
        low, high = -1, len(self.sizes)
        at, stride = start, max(1, start)
        while True:
            if self.fits(self.sizes[at]):
                low = at
                if at == last:
                    return at
                at, stride = min(last, at + stride), stride * 2
            else:
                high = at
                break
        if low < 0:
            low = -1
        while high - low > 1:
            middle = (low + high) // 2
            if self.fits(self.sizes[middle]):
                low = middle
            else:
                high = middle
        return None if low < 0 else low

    def _fastest(self, largest: int) -> tuple[int, str]:
        """The size with the most samples per second, on a geometric grid refined around its best."""
        count = min(_NUM_THROUGHPUT_SIZES, largest + 1)
        grid = {round((largest + 1) ** (i / max(1, count - 1))) - 1 for i in range(count)} | {largest}
        for index in grid:
            self.fits(self.sizes[index])
        for _ in range(3):
            best = max(grid, key=self._rate)
            ordered = sorted(grid)
            place = ordered.index(best)
            for neighbour in ordered[max(0, place - 1) : place] + ordered[place + 1 : place + 2]:
                middle = (best + neighbour) // 2
                if middle not in grid:
                    self.fits(self.sizes[middle])
                    grid.add(middle)
        best = max(grid, key=self._rate)
        size = self.sizes[best]
        return size, f"{size} has the most samples per second, {self._rate(best):.4g}, of {len(grid)} sizes planned"

    def _rate(self, index: int) -> float:
        candidate = self.trials[self.sizes[index]]
        return (candidate.samples_per_second or 0.0) if candidate.fits else 0.0

    def _nothing_fits(self) -> InfeasibleBudgetError:
        smallest = self.trials[self.sizes[0]]
        budget = self.budget(self.sizes[0])
        node = self.error.node if self.error is not None else None
        because = smallest.reason if node is None else f"because of node {node!r}"
        return InfeasibleBudgetError(
            f"no plan fits: the training step needs {format_bytes(smallest.predicted_peak_bytes)} at batch size "
            f"{smallest.batch_size}, budget {format_bytes(budget)}: {because}. Raise memory_budget or max_overhead, "
            f"lower the batch size, or choose another planner than {self.settings.planner}",
            minimum_bytes=smallest.predicted_peak_bytes,
            budget_bytes=budget,
            node=node,
        )


def find(trial: Trial, settings: Settings) -> tuple[Result, list[nn.Module]]:
    """The batch size and plan that the settings ask for, executed within the budget, and the modules rewritten by it.

    Bytes and seconds of every size come from a profile (two where several sizes are in question); the planner is
    called for each candidate and no training step is run. The choice is then executed: two real steps with optimizer.
    Where the measured peak exceeds the budget, the model is corrected by the difference and the search goes on; it
    never returns what it did not execute, and runs at most `MOST_STEPS` real steps.

    Raises:
        InfeasibleBudgetError: Nothing fits. Nothing is installed then, as on any other error.
    """
    free_bytes, total_bytes = device_memory(trial.device)
    free_bytes = trial.least(free_bytes + trial.alive_bytes())
    sizes = sizes_to_consider(trial, settings)
    search = _Search(trial, settings, sizes, _model(trial, sizes), free_bytes, trial.least(total_bytes))
    good: tuple[Result, list[Call], list[nn.Module]] | None = None
    num_steps = measured = 0
    executed: dict[int, int] = {}
    while num_steps + STEPS_PER_TRIAL <= MOST_STEPS:
        choice = trial.share(search.choose)
        size, step = choice.batch_size, choice.step
        if good is not None and (size, -step.seconds) <= (good[0].batch_size, -good[0].step.seconds):
            break
        calls = trial.look_through(size)
        modules = [call.module for call in calls]
        install(trial, calls, step)
        num_steps += STEPS_PER_TRIAL
        try:
            measured = _measure(trial, size)
        except BaseException as error:
            uninstall(modules)
            if is_too_small_for_batch_norm(error) and size != search.sizes[-1]:
                logger.info("batch norm needs more than %d samples a batch: a lower limit, not a lack of memory", size)
                search.sizes = [s for s in search.sizes if s > size]
                continue
            raise
        if measured == _OUT_OF_MEMORY:
            uninstall(modules)
            search.tighten()
            continue
        executed[size] = measured
        if max(measured, step.predicted_peak_bytes) > step.surroundings.optimizer_step_bytes:
            search.correct(measured - step.predicted_peak_bytes, size)
        if measured <= choice.budget_bytes:
            trials = tuple(replace(c, measured_peak_bytes=executed.get(c.batch_size)) for c in choice.candidates)
            plain = search.plain_peak(size)
            result = Result(size, choice.budget_bytes, step, measured, plain, trials, num_steps, choice.reason)
            could_improve = measured < 0.99 * step.predicted_peak_bytes and (step.num_recomputed or size != sizes[-1])
            if good is not None or not could_improve:
                return result, modules
            good = result, calls, modules
        uninstall(modules)
    if good is not None:
        install(trial, good[1], good[0].step)
        return good[0], good[2]
    found = "more than the device has" if measured == _OUT_OF_MEMORY else format_bytes(measured)
    raise InfeasibleBudgetError(
        f"the planned step was executed {num_steps // STEPS_PER_TRIAL} times and exceeded the budget each time, the "
        f"last time at {found}: raise memory_budget",
        minimum_bytes=measured,
    )


def lowest_peak(settings: Settings, error: InfeasibleBudgetError) -> Settings:
    """The settings that ask for what is possible: the smallest size allowed, at hardly more than its lowest peak."""
    size = settings.batch_size
    if size == "auto":
        size = -(-settings.min_batch_size // settings.multiple_of) * settings.multiple_of
    return replace(settings, batch_size=size, memory_budget=int(error.minimum_bytes * 1.02), max_overhead=None)


def _measure(trial: Trial, size: int) -> int:
    """The most that any rank measured; `_OUT_OF_MEMORY` if one ran out of it."""
    try:
        measured = trial.measure(size)
    except BaseException as error:
        if not is_out_of_memory(error):
            raise
        measured = _OUT_OF_MEMORY
    return -trial.least(-measured)


def _model(trial: Trial, sizes: Sequence[int]) -> StepModel:
    if len(sizes) == 1:
        return model_step(trial, sizes)
    large = max(4, min(trial.batch_size, _LARGEST_PROFILE))
    return model_step(trial, (large // 2, large))


def sizes_to_consider(trial: Trial, settings: Settings) -> Sequence[int]:
    """The batch sizes that the settings allow, ascending.

    Raises:
        ValueError: There is none.
    """
    if settings.batch_size == "keep":
        return [trial.batch_size]
    if settings.batch_size != "auto":
        return [settings.batch_size]
    step = settings.multiple_of
    least = -(-settings.min_batch_size // step) * step
    most = settings.max_batch_size or trial.most_samples or _LARGEST_SIZE
    if settings.effective_batch_size is None:
        sizes: Sequence[int] = range(least, most + 1, step)
    else:
        samples, rest = divmod(settings.effective_batch_size, trial.num_devices)
        most = min(most, samples)
        sizes = [] if rest else [s for s in range(least, most + 1, step) if samples % s == 0]
    if not sizes:
        raise ValueError(
            f"no batch size is left to consider: min_batch_size={settings.min_batch_size}, max_batch_size={most}, "
            f"multiple_of={step}, effective_batch_size={settings.effective_batch_size}, {trial.num_devices} devices"
        )
    return sizes
