"""Schedules planned at one batch size and replayed at others: a search then asks the planner only near its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import InfeasibleBudgetError
from ..lowering import keep_everything
from ..planners import planner_of
from ..plans.plan import Plan, StepPlan
from ..schedules.schedule import Schedule
from ..schedules.simulator import simulate
from .trial import StepModel

_NUM_BUDGETS = 16


class Pooled(NamedTuple):
    """The schedule of a region, and whether it is for the region out of place."""

    schedule: Schedule
    is_apart: bool


@dataclass(frozen=True, slots=True)
class SchedulePool:
    """Schedules between the lowest peak and the plain step.

    Attributes:
        planner: Name of the planner that made them.
        entries: For each, region name → schedule.
    """

    planner: str
    entries: tuple[dict[str, Pooled], ...]

    def added(self, step: StepPlan) -> SchedulePool:
        """The pool with the schedules of one step more."""
        return replace(self, entries=(*self.entries, _pooled(step)))

    def steps(self, model: StepModel, size: int, budget_bytes: int) -> Iterator[StepPlan]:
        """The step of a batch size by each of them, whether it stays within the budget or not."""
        graphs, apart = model.graphs_at(size), model.apart_at(size)
        plain = {k: simulate(g, keep_everything(g)) for k, g in graphs.items()}
        for entry in self.entries:
            plans: dict[str, Plan] = {}
            for k, (schedule, is_apart) in entry.items():
                graph = apart[k] if is_apart else graphs[k]
                plans[k] = Plan(self.planner, budget_bytes, schedule, simulate(graph, schedule), graph, plain[k])
            own = {k: graphs[k] for k, pooled in entry.items() if pooled.is_apart}
            yield StepPlan(budget_bytes, model.keys, plans, model.surroundings_at(size), own)


def make_pool(model: StepModel, size: int, planner: str | Callable[..., Schedule]) -> SchedulePool:
    """What the planner answers to budgets from the lowest that it can serve to the plain step's peak."""
    most = model.plain_timeline(size).peak_bytes
    try:
        least = model.plan(size, 1, planner).predicted_peak_bytes
    except InfeasibleBudgetError as error:
        least = error.sufficient_bytes
    entries: dict[tuple[str, ...], dict[str, Pooled]] = {}
    for i in range(_NUM_BUDGETS):
        try:
            step = model.plan(size, least + (most - least) * i // _NUM_BUDGETS, planner)
        except InfeasibleBudgetError:  # the optimizer's step alone, or several regions that bound each other
            continue
        entries[tuple(str(p.schedule) for p in step.plans.values())] = _pooled(step)
    return SchedulePool(planner_of(planner)[0], tuple(entries.values()))


def _pooled(step: StepPlan) -> dict[str, Pooled]:
    return {k: Pooled(p.schedule, k in step.plain_graphs) for k, p in step.plans.items()}
