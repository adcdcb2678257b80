"""Plans the regions of a training step so that the whole step fits a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..budget import ALL_BYTES, format_bytes
from ..errors import InfeasibleBudgetError
from ..planners import planner_of
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ..schedules.simulator import simulate
from .options import choose
from .plan import StepPlan, joined
from .planner import fastest_plan, plan
from .step_memory import Surroundings

_MOST_ROUNDS = 7
"""Budgets for which a region is planned before it is its lowest peak's turn."""


def plan_step(
    keys: Sequence[str],
    graphs: dict[str, Graph],
    budget_bytes: int,
    planner: str | Callable[..., Schedule],
    surroundings: Surroundings,
    *,
    apart: Mapping[str, Graph] = MappingProxyType({}),
    like: Mapping[Graph, Graph] = MappingProxyType({}),
    **options: Any,
) -> StepPlan:
    """A plan by which the whole step stays within the budget.

    One region gets all that the surroundings leave; where the step then exceeds the budget, because of gradients that
    are alive in the forward, it is planned again for less. Several calls share the budget as `options.choose`
    finds cheapest.

    Args:
        keys: The regions' names in the order of their calls.
        graphs: Region name → its operations as they run without a plan.
        budget_bytes: What the step must not exceed.
        planner: A name of `PLANNERS` or a function.
        surroundings: What is alive beside the regions.
        apart: Region name → operations with the same results that may run instead, where a plan needs them
            (in-place activations as operations of their own).
        like: Operations at this batch size → those at another one, which the planner may start from.
        **options: Passed to the planner.

    Raises:
        InfeasibleBudgetError: No plan fits; carries the least budget for the whole step.
    """
    name, _ = planner_of(planner)
    # A plan that keeps all, as the planner in question would have made it.
    plain = {
        k: replace(plan(g, ALL_BYTES, "keep_all"), planner=name, budget_bytes=budget_bytes) for k, g in graphs.items()
    }
    ways = {k: (g, apart[k]) if k in apart else (g,) for k, g in graphs.items()}
    gathering = surroundings.gathering
    is_planned = gathering is not None and bool(gathering.planned)
    if gathering is not None:
        surroundings = replace(surroundings, gathering=gathering.keeping(gathering.planned))  # nothing is faster
    found = StepPlan(budget_bytes, tuple(keys), plain, surroundings)
    if found.predicted_peak_bytes <= budget_bytes:
        return found  # nothing beats recomputing nothing, and a planner may take seconds to find that out
    if len(keys) > 1 or is_planned:
        chosen, surroundings = choose(keys, ways, budget_bytes, planner, surroundings, like=like, **options)
        plans = {
            k: replace(plain[k], graph=o.graph, schedule=o.schedule, simulation=simulate(o.graph, o.schedule))
            for k, o in chosen.items()
        }
        found = replace(found.planned(plans), surroundings=surroundings)
    else:
        found = _planned_region(found, ways[keys[0]], planner, {"like": like, **options})
    if found.predicted_peak_bytes > budget_bytes:
        raise _infeasible(found)
    return found


def _planned_region(
    step: StepPlan, ways: Sequence[Graph], planner: str | Callable[..., Schedule], options: dict[str, Any]
) -> StepPlan:
    """The step with its one region planned for the budget, or for the lowest peak that the planner reaches."""
    ((key, plain),) = step.plans.items()

    def planned(budget_bytes: int, graphs: Sequence[Graph] = ways) -> StepPlan:
        made = fastest_plan(graphs, budget_bytes, planner, **options)
        if graphs is not ways:
            graph = ways[graphs.index(made.graph)]
            made = replace(made, graph=graph, simulation=simulate(graph, made.schedule))
        return step.planned({key: replace(made, plain=plain.plain)})

    around = step.surroundings
    beside = around.resident_bytes + around.correction_bytes + min(around.handed_on.during(1))
    whole = budget = step.budget_bytes - beside
    try:
        for number in range(_MOST_ROUNDS):
            found = planned(budget)
            excess = found.predicted_peak_bytes - found.budget_bytes
            if excess <= 0 or budget <= 0:
                return found
            # A little less may lead to a schedule that exceeds by as much elsewhere: each round takes off twice that.
            budget = max(0, budget - 2**number * excess)
        found = planned(0)
    except InfeasibleBudgetError as error:
        found = planned(error.sufficient_bytes)
    if any(graph.let_go for graph in ways):
        # Planners know no end of the forward: what the caller lets go of may be held there longer than they think.
        held = [graph.holding_all for graph in ways]
        for budget in (whole, 0):
            if found.predicted_peak_bytes <= found.budget_bytes:
                break
            try:
                other = planned(budget, held)
            except InfeasibleBudgetError as error:
                other = planned(error.sufficient_bytes, held)
            found = min(found, other, key=lambda p: p.predicted_peak_bytes)
    return found


def _infeasible(step: StepPlan) -> InfeasibleBudgetError:
    timeline = step.timeline
    if timeline.optimizer_step_bytes > max(timeline.memory_bytes):
        node = "the optimizer's step"
    else:
        is_alone = len(step.keys) == 1
        graph, schedule = joined([("" if is_alone else k, step.plans[k]) for k in step.keys], step.surroundings)
        node = graph.nodes[schedule.actions[timeline.memory_bytes.index(max(timeline.memory_bytes))].node].name
    needed = timeline.peak_bytes
    return InfeasibleBudgetError(
        f"the training step needs {format_bytes(needed)} and the budget is {format_bytes(step.budget_bytes)}, because "
        f"of node {node!r}: raise memory_budget, lower the batch size, or choose another planner",
        minimum_bytes=needed,
        budget_bytes=step.budget_bytes,
        node=node,
    )
