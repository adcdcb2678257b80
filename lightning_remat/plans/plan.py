"""A schedule that fits its budget: of a graph, or of every region of a training step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from ..budget import format_bytes
from ..errors import InfeasibleBudgetError
from ..lowering import keep_everything
from ..schedules.graph import Graph, Node
from ..schedules.schedule import Action, Schedule
from ..schedules.simulator import Simulation, simulate
from ..schedules.stored import reading
from .step_memory import RegionCost, Surroundings, Timeline, forward_length, step_timeline

_STORED = ("planner", "budget_bytes", "planning_seconds", "rung", "reasons", "correction_bytes", "beside_seconds")
"""Of a plan, what is stored as it is."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule that was replayed and fits its budget.

    Attributes:
        planner: Name of the planner that proposed it.
        budget_bytes: The true peak that it must not exceed.
        schedule: What to run, keep, discard and recompute.
        simulation: The schedule's cost.
        graph: The graph that it was planned on.
        plain: The cost of the step without recomputation.
        planning_seconds: Time that the planner took.
        rung: How the module was captured: `"traced"` as a whole (see `TracedModule.rung`), `"regions"` where its parts
            were, one by one. Empty for a plan that was made on a bare graph.
        reasons: Why not as a whole and in single operations: one sentence for each part that is treated otherwise.
        step: The parts' own plans and what is alive around them, where parts were captured one by one. Graph and
            schedule are then theirs one after another, and peak and timeline those of the whole module's step.
        correction_bytes: What the executed step needed beyond what the schedule costs on the graph, which `simulation`
            counts in every moment; may be negative.
        beside_seconds: What a plain step was measured to take beside the graph's operations, which `simulation` and
            `plain` count: calls of modules, what lies between parts. 0 where operations are long, or none was timed.
    """

    planner: str
    budget_bytes: int
    schedule: Schedule
    simulation: Simulation
    graph: Graph
    plain: Simulation
    planning_seconds: float = 0.0
    rung: str = ""
    reasons: tuple[str, ...] = ()
    step: StepPlan | None = None
    correction_bytes: int = 0
    beside_seconds: float = 0.0

    def __repr__(self) -> str:
        """In one line; graph and schedule of a large network would fill pages."""
        return (
            f"<Plan of {self.planner}: {self.memory_text}, {self.num_recomputed} recomputations of "
            f"{len(self.graph.nodes)} operations, +{self.recompute_overhead:.1%} of a step>"
        )

    @property
    def memory_text(self) -> str:
        """Its peak, its budget and the plain peak, for people."""
        peak, budget, plain = map(format_bytes, (self.peak_bytes, self.budget_bytes, self.plain.peak_bytes))
        return f"peak {peak} of a budget of {budget} (plain {plain})"

    @property
    def peak_bytes(self) -> int:
        """The predicted peak."""
        return self.simulation.peak_bytes

    def corrected(self, excess_bytes: int, beside_seconds: float = 0.0) -> Plan:
        """The same plan, its prediction corrected by what executed steps needed beyond it."""
        return replace(
            self,
            simulation=self.simulation.corrected(excess_bytes, beside_seconds),
            correction_bytes=self.correction_bytes + excess_bytes,
            beside_seconds=self.beside_seconds + beside_seconds,
        )

    @property
    def recompute_overhead(self) -> float:
        """Seconds of recomputation as a fraction of the plain step's."""
        return self.simulation.recompute_seconds / self.plain.seconds if self.plain.seconds else 0.0

    @property
    def num_recomputed(self) -> int:
        """Second and later runs of a node."""
        runs = sum(action.kind == "F" for action in self.schedule)
        return runs - len(self.graph.nodes)

    def to_json(self) -> str:
        """The plan as JSON text, graph and schedule included; `from_json` reads and replays it."""
        data: dict[str, Any] = {name: getattr(self, name) for name in _STORED}
        if self.step is not None:
            return json.dumps({**data, "step": json.loads(self.step.to_json())})
        graph = json.loads(self.graph.to_json())
        return json.dumps({**data, "schedule": str(self.schedule), "plain": asdict(self.plain), "graph": graph})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote, its schedule replayed afresh.

        Raises:
            ScheduleError: The schedule does not fit its graph.
            ValueError: The text is empty, breaks off, or was not written by `to_json`.
        """
        with reading("plan"):
            return cls._read(json.loads(text))

    @classmethod
    def _read(cls, data: Mapping[str, Any]) -> Plan:
        how = {"rung": data.get("rung", ""), "reasons": tuple(data.get("reasons", ()))}
        if "step" in data:
            step = StepPlan.from_json(json.dumps(data["step"]))
            return replace(step.as_plan(data["planner"], data["planning_seconds"]), **how)
        graph = Graph.from_json(json.dumps(data["graph"]))
        schedule = Schedule.parse(data["schedule"])
        correction = data.get("correction_bytes", 0)
        made = replayed(graph, data["budget_bytes"] - correction, data["planner"], schedule, data["planning_seconds"])
        beside = data.get("beside_seconds", 0.0)
        made = replace(made, budget_bytes=data["budget_bytes"]).corrected(correction, beside)
        if "plain" in data:  # of the module as it was, which may have run in place what the plan does not
            plain: dict[str, Any] = data["plain"]
            figures: dict[str, Any] = {
                k: tuple(cast("list[Any]", v)) if isinstance(v, list) else v for k, v in plain.items()
            }
            made = replace(made, plain=Simulation(**figures))
        return replace(made, **how)


def replayed(graph: Graph, budget_bytes: int, name: str, schedule: Schedule, planning_seconds: float) -> Plan:
    """The plan of a schedule, after the simulator has judged it.

    Raises:
        InfeasibleBudgetError: It exceeds the budget.
        ScheduleError: It does not fit the graph.
    """
    simulation = simulate(graph, schedule)
    if simulation.peak_bytes > budget_bytes:
        raise InfeasibleBudgetError(
            f"planner {name} returned a schedule that peaks at {simulation.peak_bytes} bytes for a budget of "
            f"{budget_bytes} bytes; a planner must raise InfeasibleBudgetError instead",
            minimum_bytes=simulation.peak_bytes,
            budget_bytes=budget_bytes,
        )
    plain = simulate(graph, keep_everything(graph))
    return Plan(name, budget_bytes, schedule, simulation, graph, plain, planning_seconds)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A plan for every region of a step, and what the whole step costs by it.

    Attributes:
        budget_bytes: What the step must not exceed.
        keys: The regions' names in the order of their calls; a module that is called twice appears twice.
        plans: Region name → its plan.
        surroundings: What is alive beside the regions.
        plain_graphs: Those regions as they run without a plan of which that is not what was planned (in-place
            activations as operations of their own).
        plain_correction_bytes: What the plain step was measured to need beyond its prediction; None if it was not run,
            and what the planned step needed stands for it.
        beside_seconds: See `Plan`.
    """

    budget_bytes: int
    keys: tuple[str, ...]
    plans: dict[str, Plan]
    surroundings: Surroundings
    plain_graphs: dict[str, Graph] = field(default_factory=dict[str, Graph])
    plain_correction_bytes: int | None = None
    beside_seconds: float = 0.0

    @property
    def graphs(self) -> dict[str, Graph]:
        """The regions as they run without a plan."""
        return {k: p.graph for k, p in self.plans.items()} | self.plain_graphs

    def planned(self, plans: dict[str, Plan]) -> StepPlan:
        """The same step by other plans, for the same operations or for others with the same results."""
        graphs = self.graphs
        return replace(self, plans=plans, plain_graphs={k: graphs[k] for k, p in plans.items() if p.graph != graphs[k]})

    @property
    def timeline(self) -> Timeline:
        """The planned step."""
        made = {k: (p.graph, p.schedule) for k, p in self.plans.items()}
        return step_timeline(_calls(self.keys, made, self.surroundings), self.surroundings)

    @property
    def plain_timeline(self) -> Timeline:
        """The step without recomputation."""
        around = self.surroundings
        if self.plain_correction_bytes is not None:
            around = replace(around, correction_bytes=self.plain_correction_bytes)
        return plain_timeline(self.keys, self.graphs, around)

    @property
    def predicted_peak_bytes(self) -> int:
        """The peak of the planned step."""
        return self.timeline.peak_bytes

    @property
    def headroom_bytes(self) -> int:
        """What the planned step leaves of its budget."""
        return max(0, self.budget_bytes - self.predicted_peak_bytes)

    @property
    def plain_peak_bytes(self) -> int:
        """The peak of the step without recomputation."""
        return self.plain_timeline.peak_bytes

    @property
    def plain_seconds(self) -> float:
        """Forward and backward without recomputation, and the gathers that would be planned."""
        gathering = self.surroundings.gathering
        gathers = 0.0 if gathering is None else gathering.plain.seconds
        return self.beside_seconds + gathers + sum(self.plans[k].plain.seconds for k in self.keys)

    @property
    def seconds(self) -> float:
        """Forward and backward by the plan, and the second gathers where these are planned."""
        gathering = self.surroundings.gathering
        gathers = 0.0 if gathering is None else gathering.seconds
        return self.beside_seconds + gathers + sum(self.plans[k].simulation.seconds for k in self.keys)

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
        graph, schedule = joined([(k, self.plans[k]) for k in self.keys], self.surroundings)
        made = Plan(planner, self.budget_bytes, schedule, simulation, graph, plain, planning_seconds, step=self)
        return replace(made, beside_seconds=self.beside_seconds)

    def to_json(self) -> str:
        """The step as JSON text; `from_json` reads it and replays the schedules."""
        data: dict[str, Any] = {
            "budget_bytes": self.budget_bytes,
            "keys": self.keys,
            "surroundings": asdict(self.surroundings),
            "plans": {name: json.loads(plan.to_json()) for name, plan in self.plans.items()},
            "plain_graphs": {name: json.loads(graph.to_json()) for name, graph in self.plain_graphs.items()},
            "plain_correction_bytes": self.plain_correction_bytes,
            "beside_seconds": self.beside_seconds,
        }
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
        plain = {name: Graph.from_json(json.dumps(graph)) for name, graph in graphs.items()}
        around = Surroundings.from_dict(data["surroundings"])
        measured = data.get("plain_correction_bytes"), data.get("beside_seconds", 0.0)
        return cls(data["budget_bytes"], tuple(data["keys"]), plans, around, plain, *measured)


def plain_timeline(keys: Sequence[str], graphs: dict[str, Graph], surroundings: Surroundings) -> Timeline:
    """The step with every region as autograd runs it, and every unit as the user has set it."""
    made = {k: (g, keep_everything(g)) for k, g in graphs.items()}
    return step_timeline(_calls(keys, made, surroundings), surroundings.plain)


def _calls(
    keys: Sequence[str], made: Mapping[str, tuple[Graph, Schedule]], surroundings: Surroundings
) -> list[RegionCost]:
    passing = surroundings.handed_on.passing(len(keys))
    return [RegionCost(key, *made[key], passing[k], k in surroundings.over) for k, key in enumerate(keys)]


def _simulation(timeline: Timeline, seconds: float, recompute_seconds: float) -> Simulation:
    return Simulation(max(timeline.memory_bytes), seconds, recompute_seconds, timeline.memory_bytes, timeline.seconds)


def joined(calls: Sequence[tuple[str, Plan]], surroundings: Surroundings) -> tuple[Graph, Schedule]:
    """The regions' graphs side by side, and their schedules in the order in which the step runs them."""
    nodes: list[Node] = []
    outputs: list[int] = []
    parts: dict[int, list[Action]] = {}
    count: dict[str, int] = {}
    for call, (key, made) in enumerate(calls):
        start = len(nodes)
        count[key] = count.get(key, 0) + 1
        prefix = key if count[key] == 1 else f"{key}#{count[key]}"
        nodes += [_moved(node, prefix, start) for node in made.graph.nodes]
        outputs += [start + n for n in made.graph.outputs]
        actions = [Action(a.kind, a.node + start) for a in made.schedule]
        first = forward_length(made.schedule, len(made.graph.nodes))
        parts |= {call: actions[:first], ~call: actions[first:]}
    own = {key: made.graph for key, made in calls}
    between = surroundings.handed_on
    around = surroundings.resident_bytes + max(between.during(len(calls))) + max(between.passing(len(calls)))
    return (
        Graph(
            tuple(nodes),
            input_bytes=sum(made.graph.input_bytes for _, made in calls),
            static_bytes=max(0, around + sum(g.static_bytes for g in own.values())),
            outputs=tuple(outputs),
        ),
        Schedule(tuple(action for turn in surroundings.turns(len(calls)) for action in parts[turn])),
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
        held=move(node.held),
        storage_of=None if node.storage_of is None else node.storage_of + start,
        shares_gradient=None if node.shares_gradient is None else move(node.shares_gradient),
    )
