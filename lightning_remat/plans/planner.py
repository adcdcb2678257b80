"""Asks a planner for a schedule and lets the simulator judge the answer."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..budget import check_bytes
from ..errors import InfeasibleBudgetError
from ..lowering import lower_kept
from ..planners import planner_of as planner_of
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ..schedules.simulator import Simulation, simulate
from ..schedules.stored import reading

if TYPE_CHECKING:
    from .step_planner import StepPlan


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
        rung: How the module was captured (see `TracedModule.rung`); `"regions"` where its parts were, one by one. Empty
            for a plan that was made on a bare graph.
        reasons: Why not as a whole and in single operations: one sentence for each part that is treated otherwise.
        step: The parts' own plans and what is alive around them, where parts were captured one by one. Graph and
            schedule are then theirs one after another, and peak and timeline those of the whole module's step.
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

    @property
    def peak_bytes(self) -> int:
        """The predicted peak."""
        return self.simulation.peak_bytes

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
        data: dict[str, Any] = {
            "planner": self.planner,
            "budget_bytes": self.budget_bytes,
            "planning_seconds": self.planning_seconds,
            "rung": self.rung,
            "reasons": self.reasons,
        }
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
            from .step_planner import StepPlan  # which plans with this module

            step = StepPlan.from_json(json.dumps(data["step"]))
            return replace(step.as_plan(data["planner"], data["planning_seconds"]), **how)
        graph = Graph.from_json(json.dumps(data["graph"]))
        schedule = Schedule.parse(data["schedule"])
        made = _replayed(graph, data["budget_bytes"], data["planner"], schedule, data["planning_seconds"])
        if "plain" in data:  # of the module as it was, which may have run in place what the plan does not
            figures: dict[str, Any] = data["plain"]
            figures["memory_bytes"] = tuple(figures["memory_bytes"])
            made = replace(made, plain=Simulation(**figures))
        return replace(made, **how)


def plan(
    graph: Graph,
    budget_bytes: int,
    planner: str | Callable[..., Schedule] = "auto",
    *,
    like: Graph | None = None,
    **options: Any,
) -> Plan:
    """The planner's schedule for a true peak of at most `budget_bytes`, replayed by the simulator.

    >>> from lightning_remat import Graph, Node
    >>> relu = dict(kind="relu", output_bytes=100, forward_seconds=1.0, backward_seconds=2.0)
    >>> graph = Graph(tuple(Node(f"relu{i}", inputs=(i - 1,) if i else (), saved=(i,), **relu) for i in range(4)))
    >>> plan(graph, 500, "periodic").peak_bytes
    500

    Args:
        graph: The profiled operations.
        budget_bytes: Bytes of everything alive in the step at its peak.
        planner: A name of `PLANNERS`, or a function `(graph, budget_bytes, **options) -> Schedule`.
        like: The same operations at another batch size, which a planner that takes it (`auto`) starts from.
        **options: Passed to the planner.

    Returns:
        A plan whose simulated peak is within the budget.

    Raises:
        ValueError: No planner has that name, or the budget is no number.
        InfeasibleBudgetError: The planner cannot go as low; carries the lowest peak that it reaches.
        ScheduleError: A planner of the caller's returned an invalid schedule.
    """
    name, function = planner_of(planner)
    budget_bytes = check_bytes(budget_bytes)
    if like is not None and "like" in inspect.signature(function).parameters:
        options["like"] = like
    start = time.perf_counter()
    schedule = function(graph, budget_bytes, **options)
    return _replayed(graph, budget_bytes, name, schedule, time.perf_counter() - start)


def _replayed(graph: Graph, budget_bytes: int, name: str, schedule: Schedule, planning_seconds: float) -> Plan:
    simulation = simulate(graph, schedule)
    if simulation.peak_bytes > budget_bytes:
        raise InfeasibleBudgetError(
            f"planner {name} returned a schedule that peaks at {simulation.peak_bytes} bytes for a budget of "
            f"{budget_bytes} bytes; a planner must raise InfeasibleBudgetError instead",
            minimum_bytes=simulation.peak_bytes,
            budget_bytes=budget_bytes,
        )
    plain = simulate(graph, lower_kept(graph, range(len(graph.nodes))))
    return Plan(name, budget_bytes, schedule, simulation, graph, plain, planning_seconds)
