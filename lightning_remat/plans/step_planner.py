"""Plans the regions of a training step so that the whole step fits a budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from ..budget import format_bytes
from ..errors import InfeasibleBudgetError
from ..lowering import lower_kept
from ..planners import planner_of
from ..schedules.graph import Graph, Node
from ..schedules.schedule import Action, Schedule
from ..schedules.simulator import Simulation, simulate
from ..schedules.stored import reading
from .options import choose
from .planner import Plan, plan
from .step_memory import RegionCost, Surroundings, Timeline, forward_length, step_timeline

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
        plain_graphs: The regions as they run without a plan, where that is not what was planned (in-place activations
            as operations of their own).
    """

    budget_bytes: int
    keys: tuple[str, ...]
    plans: dict[str, Plan]
    surroundings: Surroundings
    plain_graphs: dict[str, Graph] | None = None

    @property
    def timeline(self) -> Timeline:
        """The planned step."""
        costs = [RegionCost(k, self.plans[k].graph, self.plans[k].schedule) for k in self.keys]
        return step_timeline(costs, self.surroundings)

    @property
    def plain_timeline(self) -> Timeline:
        """The step without recomputation."""
        graphs = self.plain_graphs or {k: p.graph for k, p in self.plans.items()}
        return plain_timeline(self.keys, graphs, self.surroundings)

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
        return self.recompute_seconds / (self.plain_seconds or 1.0)

    @property
    def recompute_seconds(self) -> float:
        """The part of `seconds` that goes into second and later runs of an operation."""
        return sum(self.plans[k].simulation.recompute_seconds for k in self.keys)

    @property
    def num_recomputed(self) -> int:
        """Second and later runs of an operation, in one step."""
        return sum(self.plans[k].num_recomputed for k in self.keys)

    def corrected(self, excess_bytes: int) -> StepPlan:
        """The same plan, its prediction corrected by what a measured step needed beyond it."""
        return replace(self, surroundings=self.surroundings.corrected(excess_bytes))

    def as_plan(self, planner: str, planning_seconds: float = 0.0) -> Plan:
        """The step as one plan: the regions' operations one after another, the figures those of the whole step."""
        simulation = _simulation(self.timeline, self.seconds, self.recompute_seconds)
        plain = _simulation(self.plain_timeline, self.plain_seconds, 0.0)
        graph, schedule = _joined([(k, self.plans[k]) for k in self.keys], self.surroundings)
        return Plan(planner, self.budget_bytes, schedule, simulation, graph, plain, planning_seconds, step=self)

    def to_json(self) -> str:
        """The step as JSON text; `from_json` reads it and replays the schedules."""
        data: dict[str, Any] = {
            "budget_bytes": self.budget_bytes,
            "keys": self.keys,
            "surroundings": asdict(self.surroundings),
            "plans": {name: json.loads(plan.to_json()) for name, plan in self.plans.items()},
        }
        if self.plain_graphs is not None:
            data["plain_graphs"] = {name: json.loads(graph.to_json()) for name, graph in self.plain_graphs.items()}
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> StepPlan:
        """The step that `to_json` wrote.

        Raises:
            ScheduleError: A schedule does not fit its graph.
            ValueError: The text is empty, breaks off, or was not written by `to_json`.
        """
        with reading("plan of a step"):
            return cls._read(json.loads(text))

    @classmethod
    def _read(cls, data: Mapping[str, Any]) -> StepPlan:
        plans = {name: Plan.from_json(json.dumps(plan)) for name, plan in data["plans"].items()}
        graphs: dict[str, Any] = data.get("plain_graphs", {})
        plain = {name: Graph.from_json(json.dumps(graph)) for name, graph in graphs.items()} or None
        return cls(
            data["budget_bytes"], tuple(data["keys"]), plans, Surroundings.from_dict(data["surroundings"]), plain
        )


def _simulation(timeline: Timeline, seconds: float, recompute_seconds: float) -> Simulation:
    return Simulation(max(timeline.memory_bytes), seconds, recompute_seconds, timeline.memory_bytes)


def _joined(calls: Sequence[tuple[str, Plan]], surroundings: Surroundings) -> tuple[Graph, Schedule]:
    """The regions' graphs side by side; their schedules, forwards in the order of the calls, backwards in reverse."""
    nodes: list[Node] = []
    outputs: list[int] = []
    forward: list[Action] = []
    backward: list[Action] = []
    count: dict[str, int] = {}
    for key, made in calls:
        start = len(nodes)
        count[key] = count.get(key, 0) + 1
        prefix = key if count[key] == 1 else f"{key}#{count[key]}"
        nodes += [_moved(node, prefix, start) for node in made.graph.nodes]
        outputs += [start + n for n in made.graph.outputs]
        actions = [Action(a.kind, a.node + start) for a in made.schedule]
        first = forward_length(made.schedule, len(made.graph.nodes))
        forward += actions[:first]
        backward = actions[first:] + backward
    own = {key: made.graph for key, made in calls}
    return (
        Graph(
            tuple(nodes),
            input_bytes=sum(made.graph.input_bytes for _, made in calls),
            static_bytes=max(0, surroundings.resident_bytes + sum(g.static_bytes for g in own.values())),
            outputs=tuple(outputs),
        ),
        Schedule(tuple(forward + backward)),
    )


def _moved(node: Node, prefix: str, start: int) -> Node:
    """The node under its region's name, `start` places further."""

    def move(indices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i + start for i in indices)

    return replace(
        node,
        name=f"{prefix}.{node.name}" if prefix else node.name,
        inputs=move(node.inputs),
        saved=move(node.saved),
        storage_of=None if node.storage_of is None else node.storage_of + start,
        shares_gradient=None if node.shares_gradient is None else move(node.shares_gradient),
    )


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
    *,
    plain_graphs: dict[str, Graph] | None = None,
    like: Mapping[str, Graph] = MappingProxyType({}),
    **options: Any,
) -> StepPlan:
    """A plan by which the whole step stays within the budget.

    One region gets all that the surroundings leave; where the step then exceeds the budget, because of gradients that
    are alive in the forward, it is planned again for less. Several calls share the budget as `options.choose`
    finds cheapest.

    Args:
        keys: The regions' names in the order of their calls.
        graphs: Region name → the operations to plan.
        budget_bytes: What the step must not exceed.
        planner: A name of `PLANNERS` or a function.
        surroundings: What is alive beside the regions.
        plain_graphs: Region name → the operations that it runs without a plan, where they are others.
        like: Region name → its operations at another batch size, which the planner may start from.
        **options: Passed to the planner.

    Raises:
        InfeasibleBudgetError: No plan fits; carries the least budget for the whole step.
    """
    name, _ = planner_of(planner)
    # A plan that keeps all, as the planner in question would have made it.
    plain = {
        k: replace(plan(g, _NO_LIMIT, "keep_all"), planner=name, budget_bytes=budget_bytes)
        for k, g in (plain_graphs or graphs).items()
    }
    found = StepPlan(budget_bytes, tuple(keys), plain, surroundings)
    if found.predicted_peak_bytes <= budget_bytes:
        return found  # nothing beats recomputing nothing, and a planner may take seconds to find that out
    if len(keys) > 1:
        schedules = choose(keys, graphs, budget_bytes, planner, surroundings, like=like, **options)
        plans = {
            k: replace(p, graph=graphs[k], schedule=schedules[k], simulation=simulate(graphs[k], schedules[k]))
            for k, p in plain.items()
        }
        found = replace(found, plans=plans, plain_graphs=plain_graphs)
    else:
        found = _planned_region(
            replace(found, plain_graphs=plain_graphs), graphs[keys[0]], planner, {"like": like.get(keys[0]), **options}
        )
    if found.predicted_peak_bytes > budget_bytes:
        raise _infeasible(found)
    return found


def _planned_region(
    step: StepPlan, graph: Graph, planner: str | Callable[..., Schedule], options: dict[str, Any]
) -> StepPlan:
    """The step with its one region planned for the budget, or for the lowest peak that the planner reaches."""
    ((key, plain),) = step.plans.items()
    around = step.surroundings.resident_bytes + step.surroundings.correction_bytes
    budget, floor = step.budget_bytes - around, 0
    for number in range(_MOST_ROUNDS):
        try:
            made = plan(graph, budget, planner, **options)
        except InfeasibleBudgetError as error:
            budget = floor = int(error.minimum_bytes)
            made = plan(graph, budget, planner, **options)
        step = replace(step, plans={key: replace(made, plain=plain.plain)})
        excess = step.predicted_peak_bytes - step.budget_bytes
        if excess <= 0 or budget <= floor:
            break
        # A little less may lead to a schedule that exceeds by as much elsewhere: each round takes twice as much off.
        budget = max(floor, budget - (excess << number)) if number < _MOST_ROUNDS - 2 else floor
    return step


def _infeasible(step: StepPlan) -> InfeasibleBudgetError:
    timeline = step.timeline
    if timeline.optimizer_step_bytes > max(timeline.memory_bytes):
        node = "the optimizer's step"
    else:
        is_alone = len(step.keys) == 1
        graph, schedule = _joined([("" if is_alone else k, step.plans[k]) for k in step.keys], step.surroundings)
        node = graph.nodes[schedule.actions[timeline.memory_bytes.index(max(timeline.memory_bytes))].node].name
    needed = timeline.peak_bytes
    return InfeasibleBudgetError(
        f"the training step needs {format_bytes(needed)} and the budget is {format_bytes(step.budget_bytes)}, because "
        f"of node {node!r}: raise memory_budget, lower the batch size, or choose another planner",
        minimum_bytes=needed,
        budget_bytes=step.budget_bytes,
        node=node,
    )
