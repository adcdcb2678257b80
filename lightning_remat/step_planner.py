"""Plans the regions of a training step so that the whole step fits a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .budget import format_bytes
from .errors import InfeasibleBudgetError
from .graph import Graph
from .lowering import lower_kept
from .planner import Plan, plan
from .schedule import Schedule
from .step_memory import RegionCost, Surroundings, Timeline, step_timeline

_MOST_ROUNDS = 8
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A plan for every region of a step, and what the whole step costs by it.

    Attributes:
        budget_bytes: What the step must not exceed.
        keys: The regions' names in the order of their calls; a module that is called twice appears twice.
        plans: Region name → its plan.
        surroundings: What is alive beside the regions.
    """

    budget_bytes: int
    keys: tuple[str, ...]
    plans: dict[str, Plan]
    surroundings: Surroundings

    @property
    def timeline(self) -> Timeline:
        """The planned step."""
        costs = [RegionCost(k, self.plans[k].graph, self.plans[k].schedule) for k in self.keys]
        return step_timeline(costs, self.surroundings)

    @property
    def plain_timeline(self) -> Timeline:
        """The step without recomputation."""
        return plain_timeline(self.keys, {k: p.graph for k, p in self.plans.items()}, self.surroundings)

    @property
    def predicted_peak_bytes(self) -> int:
        """The peak of the planned step."""
        return self.timeline.peak_bytes

    @property
    def plain_peak_bytes(self) -> int:
        """The peak of the step without recomputation."""
        return self.plain_timeline.peak_bytes

    @property
    def plain_seconds(self) -> float:
        """Forward and backward of the regions without recomputation."""
        return sum(self.plans[k].plain.seconds for k in self.keys)

    @property
    def seconds(self) -> float:
        """Forward and backward of the regions by the plan."""
        return sum(self.plans[k].simulation.seconds for k in self.keys)

    @property
    def recompute_overhead(self) -> float:
        """Seconds of recomputation as a fraction of the plain step's."""
        return sum(self.plans[k].simulation.recompute_seconds for k in self.keys) / (self.plain_seconds or 1.0)

    @property
    def num_recomputed(self) -> int:
        """Second and later runs of an operation, in one step."""
        return sum(self.plans[k].num_recomputed for k in self.keys)

    def corrected(self, excess_bytes: int) -> StepPlan:
        """The same plan, its prediction corrected by what a measured step needed beyond it."""
        return replace(self, surroundings=self.surroundings.corrected(excess_bytes))


def plain_timeline(keys: Sequence[str], graphs: dict[str, Graph], surroundings: Surroundings) -> Timeline:
    """The step with every region as autograd runs it."""
    schedules = {k: lower_kept(g, range(len(g.nodes))) for k, g in graphs.items()}
    return step_timeline([RegionCost(k, graphs[k], schedules[k]) for k in keys], surroundings)


def plan_step(
    keys: Sequence[str],
    graphs: dict[str, Graph],
    budget_bytes: int,
    planner: str | Callable[..., Schedule],
    surroundings: Surroundings,
    **options: Any,
) -> StepPlan:
    """A plan by which the whole step stays within the budget.

    A region first gets all that the surroundings leave. Where the step then exceeds the budget, because of gradients
    that are alive in the forward or of other regions, the excess is taken off the regions' budgets in proportion to
    what each can still give, and they are planned again.

    Raises:
        InfeasibleBudgetError: No plan fits; carries the least budget for the whole step.
    """
    plain = {k: _labelled(plan(g, _NO_LIMIT, "keep_all"), budget_bytes, planner) for k, g in graphs.items()}
    found = StepPlan(budget_bytes, tuple(keys), plain, surroundings)
    if found.predicted_peak_bytes <= budget_bytes:
        return found  # nothing beats recomputing nothing, and a planner may take seconds to find that out
    around = surroundings.resident_bytes + surroundings.correction_bytes
    fixed = {k: g.static_bytes + g.input_bytes for k, g in graphs.items()}
    budgets = {k: budget_bytes - around - sum(fixed.values()) + fixed[k] for k in graphs}
    floors: dict[str, tuple[int, str | None]] = {}
    rounds = 0
    while True:
        rounds += 1
        if rounds > _MOST_ROUNDS:  # the excess did not go away: the lowest that there is
            budgets = {k: _floor(k, g, planner, options, floors) for k, g in graphs.items()}
        plans: dict[str, Plan] = {}
        for key, graph in graphs.items():
            try:
                plans[key] = plan(graph, budgets[key], planner, **options)
            except InfeasibleBudgetError as error:
                floors[key] = int(error.minimum_bytes), error.node
                budgets[key] = int(error.minimum_bytes)
                plans[key] = plan(graph, budgets[key], planner, **options)
        found = StepPlan(budget_bytes, tuple(keys), plans, surroundings)
        excess = found.predicted_peak_bytes - budget_bytes
        if excess <= 0:
            return found
        if len(graphs) > 1:
            room = {k: max(0, budgets[k] - _floor(k, g, planner, options, floors)) for k, g in graphs.items()}
        else:
            room = {k: max(0, b - floors[k][0]) if k in floors else excess for k, b in budgets.items()}
        if not sum(room.values()) or rounds > _MOST_ROUNDS:
            break
        for key, give in room.items():
            budgets[key] -= min(give, -(-excess * give // sum(room.values())))
    timeline = found.timeline
    if timeline.optimizer_step_bytes > max(timeline.memory_bytes):
        node = "the optimizer's step"
    else:
        node = max(floors.values(), key=lambda floor: floor[0])[1] if floors else None
    needed = timeline.peak_bytes
    raise InfeasibleBudgetError(
        f"the training step needs {format_bytes(needed)} and the budget is {format_bytes(budget_bytes)}, because of "
        f"node {node!r}: raise memory_budget, lower the batch size, or choose another planner",
        minimum_bytes=needed,
        budget_bytes=budget_bytes,
        node=node,
    )


def _labelled(plain: Plan, budget_bytes: int, planner: str | Callable[..., Schedule]) -> Plan:
    """A plan that keeps all, as the planner in question would have made it."""
    name = planner if isinstance(planner, str) else getattr(planner, "__name__", repr(planner))
    return replace(plain, planner=name, budget_bytes=budget_bytes)


def _floor(
    key: str,
    graph: Graph,
    planner: str | Callable[..., Schedule],
    options: dict[str, Any],
    floors: dict[str, tuple[int, str | None]],
) -> int:
    """The lowest peak that the planner reaches for a region, remembered in `floors`."""
    if key not in floors:
        try:
            floors[key] = plan(graph, 0, planner, **options).peak_bytes, None
        except InfeasibleBudgetError as error:
            floors[key] = int(error.minimum_bytes), error.node
    return floors[key][0]
