"""Schedules planned at one batch size and replayed at others: a search then asks the planner only near its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..errors import InfeasibleBudgetError
from ..lowering import lower_kept
from ..planners import planner_of
from ..plans.plan import Plan, StepPlan, plain_timeline
from ..plans.step_memory import RegionCost, Surroundings, step_timeline
from ..plans.step_planner import plan_step
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ..schedules.simulator import Simulation, simulate

_NUM_BUDGETS = 16


@dataclass(frozen=True, slots=True)
class SchedulePool:
    """Schedules between the lowest peak and the plain step.

    Attributes:
        planner: Name of the planner that made them.
        entries: For each, region name → schedule.
    """

    planner: str
    entries: tuple[dict[str, Schedule], ...]

    def added(self, schedules: dict[str, Schedule]) -> SchedulePool:
        """The pool with one entry more."""
        return replace(self, entries=(*self.entries, schedules))

    def best(
        self,
        keys: Sequence[str],
        graphs: dict[str, Graph],
        budget_bytes: int,
        surroundings: Surroundings,
        max_overhead: float | None,
        plain_graphs: dict[str, Graph] | None = None,
    ) -> StepPlan | None:
        """The fastest of them that stays within the budget (and the overhead) on these graphs; None if none does."""
        own = plain_graphs or graphs
        plain = {k: simulate(g, lower_kept(g, range(len(g.nodes)))) for k, g in own.items()}
        found: StepPlan | None = None
        for entry in self.entries:
            plans = {k: self._plan(g, entry[k], budget_bytes, plain[k]) for k, g in graphs.items()}
            step = StepPlan(budget_bytes, tuple(keys), plans, surroundings, plain_graphs)
            if step.predicted_peak_bytes > budget_bytes:
                continue
            if max_overhead is not None and step.recompute_overhead > max_overhead:
                continue
            if found is None or step.seconds < found.seconds:
                found = step
        return found

    def lowest_peak(self, keys: Sequence[str], graphs: dict[str, Graph], surroundings: Surroundings) -> int:
        """The lowest peak of them on these graphs."""
        costs = ([RegionCost(k, graphs[k], entry[k]) for k in keys] for entry in self.entries)
        peaks = [step_timeline(c, surroundings).peak_bytes for c in costs]
        return min(peaks, default=plain_timeline(keys, graphs, surroundings).peak_bytes)

    def _plan(self, graph: Graph, schedule: Schedule, budget_bytes: int, plain: Simulation) -> Plan:
        return Plan(self.planner, budget_bytes, schedule, simulate(graph, schedule), graph, plain)


def make_pool(
    keys: Sequence[str],
    graphs: dict[str, Graph],
    planner: str | Callable[..., Schedule],
    surroundings: Surroundings,
) -> SchedulePool:
    """What the planner answers to budgets from the lowest that it can serve to the plain step's peak."""
    most = plain_timeline(keys, graphs, surroundings).peak_bytes
    try:
        least = plan_step(keys, graphs, 1, planner, surroundings).predicted_peak_bytes
    except InfeasibleBudgetError as error:
        least = int(error.minimum_bytes)
    entries: dict[tuple[str, ...], dict[str, Schedule]] = {}
    name, _ = planner_of(planner)
    for i in range(_NUM_BUDGETS):
        budget = least + (most - least) * i // _NUM_BUDGETS
        try:
            step = plan_step(keys, graphs, budget, planner, surroundings)
        except InfeasibleBudgetError:  # the optimizer's step alone, or several regions that bound each other
            continue
        schedules = {k: p.schedule for k, p in step.plans.items()}
        entries[tuple(map(str, schedules.values()))] = schedules
    return SchedulePool(name, tuple(entries.values()))
