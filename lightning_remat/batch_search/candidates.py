"""Which batch size to execute next: planned candidates, none of them run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..budget import format_bytes, parse_budget
from ..errors import InfeasibleBudgetError
from ..plans.plan import StepPlan
from ..reports.result import Candidate
from .schedule_pool import SchedulePool, make_pool
from .settings import Settings
from .trial import StepModel

_NUM_THROUGHPUT_SIZES = 12
_TIGHTER, _MUCH_TIGHTER = 0.85, 0.5
"""Parts of the budget to plan for after a step that ran out of memory, and after another one."""

_ABOVE_LOWEST = 1.02
"""Of the lowest peak; a planner that has a little room is far faster than one at its floor."""

_MOST_REASONS = 3
"""Why parts are not planned that an error tells."""

_MOST_QUESTIONS = 3
"""Sizes near the largest for which the planner is asked; a thorough planner takes seconds for each."""


class Choice(NamedTuple):
    """What a search proposes to execute."""

    batch_size: int
    reason: str
    step: StepPlan
    budget_bytes: int
    candidates: tuple[Candidate, ...]


@dataclass(slots=True)
class CandidateSearch:
    """What a search knows: the model of the step, the budget and what was planned so far.

    Attributes:
        present_size: The loader's batch size, to which percentages of the budget refer.
        settings: What the user asks for.
        sizes: The batch sizes to consider, ascending.
        model: Bytes and seconds of the step at any size.
        free_bytes: What the device has for the step.
        total_bytes: What the device has.
        tight: The part of the budget that is planned for; below 1 once a step ran out of memory, or for the last try.
        ran_out: The part of the budget with which one did.
        gaps_bytes: What of that is left for gaps between the pieces that a device's allocator hands out.
        trials: Batch size → its candidate.
        steps: Batch size → its plan, where one fits.
        error: The last one of the planner.
        pool: Schedules made at a profiled size, replayed at others.
        plain_steps: Batch size → the step without recomputation, where it was executed, its prediction corrected.
    """

    present_size: int
    settings: Settings
    sizes: Sequence[int]
    model: StepModel
    free_bytes: int
    total_bytes: int
    tight: float = 1.0
    ran_out: float = 1.0
    gaps_bytes: int = 0
    trials: dict[int, Candidate] = field(default_factory=dict[int, Candidate])
    steps: dict[int, StepPlan] = field(default_factory=dict[int, StepPlan])
    error: InfeasibleBudgetError | None = None
    pool: SchedulePool | None = None
    plain_steps: dict[int, StepPlan] = field(default_factory=dict[int, StepPlan])

    def plain_peak(self, size: int) -> int:
        """Peak of the step without recomputation, predicted or measured."""
        known = self.plain_steps.get(size)
        return self.model.plain_timeline(size).peak_bytes if known is None else known.predicted_peak_bytes

    def budget(self, size: int) -> int:
        """The budget of the step in bytes; a percentage is of the plain step as the loader has it."""
        wanted, margin = self.settings.memory_budget, self.settings.margin
        if wanted is None:
            return int(self.free_bytes * (1 - margin))  # what is alive already is in the budget, and counted as free
        if isinstance(wanted, float):
            return parse_budget(wanted, plain_peak_bytes=0, device_bytes=int(self.total_bytes * (1 - margin)))
        plain = self.plain_peak(size if len(self.sizes) == 1 else self.present_size)
        return parse_budget(wanted, plain_peak_bytes=plain, device_bytes=0)

    def planned_for(self, size: int) -> int:
        """The part of the budget that is planned for, in bytes."""
        return max(1, int(self.budget(size) * self.tight) - self.gaps_bytes)

    def fits(self, size: int, *, ask_planner: bool = True) -> bool:
        """Plans for a batch size, once for each state of the model; with earlier schedules only, if they will do."""
        if size in self.trials:
            return self.trials[size].fits
        around, plain = self.model.surroundings_at(size), self.model.plain_timeline(size)
        plain_rate = size / max(sum(plain.seconds) + around.seconds, 1e-12)
        budget = self.planned_for(size)
        if size in self.plain_steps and self.plain_peak(size) <= budget:
            return self._record(size, self.plain_steps[size], self.plain_peak(size), plain_rate)
        step = None if plain.peak_bytes <= budget else self._pooled(size)
        needed: int | None = None
        if step is None and not ask_planner and plain.peak_bytes > budget and self.pool is not None:
            pooled = self.pool.steps(self.model, size, budget)
            needed = min((s.predicted_peak_bytes for s in pooled), default=plain.peak_bytes)
        elif step is None or ask_planner:
            try:
                planned = self.model.plan(size, budget, self.settings.planner)
                if self.pool is not None and planned.num_recomputed:
                    self.pool = self.pool.added(planned)
                step = planned if step is None or planned.seconds <= step.seconds else step
            except InfeasibleBudgetError as error:
                self.error, needed = error.with_traceback(None), error.sufficient_bytes
        if step is None:
            assert needed is not None, "neither a plan nor a reason"
            is_memory = needed > budget
            reason = (
                f"needs {format_bytes(needed)}" if is_memory else f"overhead above {self.settings.max_overhead:.0%}"
            )
            self.trials[size] = Candidate(size, plain.peak_bytes, needed, None, None, plain_rate, False, reason)
            return False
        return self._record(size, step, plain.peak_bytes, plain_rate)

    def _record(self, size: int, step: StepPlan, plain_peak_bytes: int, plain_rate: float) -> bool:
        overhead, limit = step.recompute_overhead, self.settings.max_overhead
        fits = limit is None or overhead <= limit
        reason = "" if fits else f"overhead above {limit:.0%}"
        rate = size / max(step.seconds + step.surroundings.seconds, 1e-12)
        peak = step.predicted_peak_bytes
        self.trials[size] = Candidate(size, plain_peak_bytes, peak, overhead, rate, plain_rate, fits, reason)
        self.steps[size] = step
        return fits

    def _pooled(self, size: int) -> StepPlan | None:
        """A plan for a batch size without asking the planner; None if none of its earlier schedules serves."""
        if len(self.sizes) == 1 or self.model.line is None:
            return None
        if self.pool is None:
            self.pool = make_pool(self.model, self.model.line.large, self.settings.planner)
        budget, limit = self.planned_for(size), self.settings.max_overhead
        fitting = [s for s in self.pool.steps(self.model, size, budget) if s.predicted_peak_bytes <= budget]
        allowed = [s for s in fitting if limit is None or s.recompute_overhead <= limit]
        return min(allowed, key=lambda step: step.seconds, default=None)

    def lowest_peak(self) -> int:
        """The lowest peak of the smallest size's step, in bytes; the search itself is not changed."""
        settings = replace(self.settings, memory_budget=1, max_overhead=None)
        search = replace(self, sizes=self.sizes[:1], settings=settings)
        search.exchange(self.model)
        try:
            return search.choose().step.predicted_peak_bytes
        except InfeasibleBudgetError as error:
            return error.sufficient_bytes

    def leanest(self) -> Choice:
        """The smallest size at hardly more than the lowest peak of its step; the search itself is not changed."""
        search = replace(self)
        search.settle_for_lowest(self.lowest_peak())
        return search.choose()

    def settle_for_lowest(self, peak_bytes: int) -> None:
        """From here on the only candidate is the smallest size, at hardly more than the lowest peak of its step."""
        self.sizes = self.sizes[:1]
        self.settings = replace(self.settings, memory_budget=int(peak_bytes * _ABOVE_LOWEST), max_overhead=None)
        self.exchange(self.model)

    def exchange(self, model: StepModel) -> None:
        """From here on it plans by another model of the same step; what was planned by the old one is stale."""
        self.model, self.pool = model, None
        self.trials, self.steps = {}, {}

    def correct(self, excess_bytes: int, size: int) -> None:
        """The model learns from a measured step; what was planned by the old one is stale."""
        self.model = self.model.corrected(excess_bytes, size)
        self.trials, self.steps = {}, {}

    def know_plain(self, step: StepPlan, size: int) -> None:
        """The step without recomputation was executed; what was planned before that was known is stale."""
        self.plain_steps[size] = step
        self.trials, self.steps = {}, {}

    def recount(self, free_bytes: int) -> None:
        """The device has that much now: less than before where libraries keep memory (code for each new shape)."""
        if free_bytes < self.free_bytes:
            self.free_bytes = free_bytes
            if self.settings.memory_budget is None:
                self.trials, self.steps = {}, {}

    def tighten(self, choice: Choice) -> None:
        """A step ran out of memory; by how much is not known."""
        part = _TIGHTER if self.tight == 1.0 else _MUCH_TIGHTER
        self.ran_out = self.tight = choice.step.predicted_peak_bytes / choice.budget_bytes
        self.leave_room(part)

    def loosen(self) -> None:
        """What is planned for since a step ran out of memory leaves room: half of what lies between is taken."""
        self.tight = (self.ran_out + self.tight) / 2
        self.trials, self.steps = {}, {}

    def leave_gaps(self, num_bytes: int) -> None:
        """From here on at least so many bytes of the budget are not planned for."""
        self.gaps_bytes = max(self.gaps_bytes, num_bytes)
        self.trials, self.steps = {}, {}

    def leave_room(self, part: float) -> None:
        """From here on only that part of the budget is planned for."""
        self.tight *= part
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
            return top, "the only size in question"
        if self.settings.objective == "throughput":
            return self._fastest(largest)
        if largest + 1 == len(self.sizes):
            return top, f"{top} is the largest size allowed, and it fits"
        after = self.trials[self.sizes[largest + 1]]
        return top, f"{top} is the largest size that fits: {after.batch_size} {after.reason}"

    def _largest(self) -> int | None:
        """Index of the largest size that fits, by the planner's word for it and for the size after it.

        Schedules made at a profiled size say where about that is; from there the planner is asked, a few times.
        """
        last = len(self.sizes) - 1
        low = self._last_index(lambda size: self.plain_peak(size) <= self.planned_for(size), -1, last + 1)
        if low >= 0:
            self.fits(self.sizes[low])  # on record, to compare with
        if low < last:
            low = self._last_index(lambda size: self._pooled(size) is not None, low, last + 1)
        high, stride = last + 1, 1
        questions = iter(range(_MOST_QUESTIONS))
        while low < last:
            at = min(last, low + stride)
            if not self.fits(self.sizes[at], ask_planner=next(questions, None) is not None):
                high = at
                break
            low, stride = at, stride * 2
        low = self._last_index(lambda size: self.fits(size, ask_planner=next(questions, None) is not None), low, high)
        if low < 0:
            self.fits(self.sizes[0])  # for the error
            return None
        self.fits(self.sizes[low])
        return low

    def _last_index(self, holds: Callable[[int], bool], low: int, high: int) -> int:
        """The largest index whose size `holds` is true of, from `low` (true, or -1) on, below `high`."""
        while high - low > 1:
            middle = (low + high) // 2
            if holds(self.sizes[middle]):
                low = middle
            else:
                high = middle
        return low

    def _fastest(self, largest: int) -> tuple[int, str]:
        """The size with the most samples per second, on a geometric grid refined around its best."""
        steps = min(_NUM_THROUGHPUT_SIZES, largest + 1)
        grid = {round((largest + 1) ** (i / max(1, steps - 1))) - 1 for i in range(steps)} | {largest}
        for index in grid:
            self.fits(self.sizes[index], ask_planner=False)
        places = {size: index for index, size in enumerate(self.sizes)}
        grid |= {places[size] for size in self.trials}  # those tried on the way to the largest count as well
        for _ in range(3):
            best = max(grid, key=self._rate)
            ordered = sorted(grid)
            place = ordered.index(best)
            for neighbour in ordered[max(0, place - 1) : place] + ordered[place + 1 : place + 2]:
                middle = (best + neighbour) // 2
                if middle not in grid:
                    self.fits(self.sizes[middle], ask_planner=False)
                    grid.add(middle)
        best = max(grid, key=self._rate)
        size = self.sizes[best]
        del self.trials[size]
        self.fits(size)  # the planner may know better than its earlier schedules, never worse
        return size, f"{size} has the most samples per second, {self._rate(best):.4g}, of {len(grid)} sizes planned"

    def _rate(self, index: int) -> float:
        candidate = self.trials[self.sizes[index]]
        return (candidate.samples_per_second or 0.0) if candidate.fits else 0.0

    def _nothing_fits(self) -> InfeasibleBudgetError:
        smallest = self.trials[self.sizes[0]]
        budget = self.budget(self.sizes[0])
        node = self.error.node if self.error is not None else None
        because = smallest.reason if node is None else f"because of node {node!r}"
        planned_for = "" if self.tight == 1.0 else f" ({self.tight:.0%} of it planned for, as a step needed too much)"
        left = "".join(f"\n  {reason}" for reason in self.model.reasons[:_MOST_REASONS])
        not_planned = f"\nParts of the step are not planned:{left}" if left else ""
        return InfeasibleBudgetError(
            f"no plan fits: the training step needs {format_bytes(smallest.predicted_peak_bytes)} at batch size "
            f"{smallest.batch_size}, budget {format_bytes(budget)}{planned_for}: {because}. {self._remedies()}"
            f"{not_planned}",
            minimum_bytes=smallest.predicted_peak_bytes,
            budget_bytes=budget,
            node=node,
        )

    def _remedies(self) -> str:
        """What may help, of what was not asked for already."""
        settings = self.settings
        ways = ["raise memory_budget"]
        if settings.max_overhead is not None:
            ways.append("raise max_overhead")
        if settings.planner != "auto":
            ways.append('take planner="auto", which goes lowest')
        if len(self.sizes) == 1:
            ways.append("lower the batch size")
        ways.append('on_infeasible="minimum" trains at the lowest peak' if settings.on_infeasible == "raise" else "")
        return f"Remedies: {'; '.join(filter(None, ways))}"
