"""Schedules of one region, which its planner is asked for by limits on what it needs and on what it holds.

A region is in memory twice over: its own peak while it runs, and what it holds while the others run. A planner that
sees one region alone has no reason to hold little. It gets one more operation, therefore, which stands for the rest
of the step: whatever is resident then is added to that operation's workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ..errors import InfeasibleBudgetError
from ..lowering import keep_everything
from ..schedules.graph import Graph, Node
from ..schedules.schedule import Schedule
from ..schedules.simulator import simulate
from .planner import plan
from .step_memory import RegionCost, RegionPeaks, region_peaks

Planner = str | Callable[..., Schedule]

_HELD = 6
"""Limits on what a region holds for which the planner is asked, from the least to what the plain run holds."""


@dataclass(frozen=True, slots=True)
class Option:
    """One schedule of a region.

    Attributes:
        graph: The region's operations, in one of the ways in which they may run.
        schedule: On this graph.
        seconds: Its forward and backward.
        peaks: What it needs while it runs, and holds while others do.
    """

    graph: Graph
    schedule: Schedule
    seconds: float
    peaks: RegionPeaks


def owning_nothing(graph: Graph) -> Graph:
    """The graph without what is alive throughout, on which no schedule depends: a rank of any world has the same."""
    return replace(graph, static_bytes=0, input_bytes=0)


@dataclass(frozen=True, slots=True)
class Asking:
    """A planner, asked for schedules of one region.

    Attributes:
        graph: The region's operations, which own nothing.
        planner: A name or a function.
        is_accumulating: Whether the region adds to gradients that are there.
        options: Passed to the planner.
        like: The same operations at a batch size from whose search those for all limits start; None for these.
    """

    graph: Graph
    planner: Planner = field(hash=False)  # one that is an object may have no hash
    is_accumulating: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    like: Graph | None = None

    def option(self, schedule: Schedule) -> Option:
        """A schedule with what it costs."""
        peaks = region_peaks(RegionCost("", self.graph, schedule), self.is_accumulating)
        return Option(self.graph, schedule, simulate(self.graph, schedule).seconds, peaks)

    def answer(self, peak_bytes: int, rest_bytes: int) -> Option | None:
        """One with at most `peak_bytes` of its own, of which it leaves `rest_bytes` to the rest of the step.

        Where that cannot be, one with the least that the planner needs; None where it does not keep to that.
        """
        extended, start = _with_rest(self.graph, rest_bytes), _with_rest(self.like or self.graph, 0)
        try:
            made = plan(extended, peak_bytes, self.planner, like=start, **dict(self.options))
        except InfeasibleBudgetError as error:
            try:
                made = plan(extended, error.sufficient_bytes, self.planner, like=start, **dict(self.options))
            except InfeasibleBudgetError:  # what it said to be its lowest peak is not: nothing to learn here
                return None
        return self.option(Schedule(tuple(a for a in made.schedule if a.node < len(self.graph.nodes))))


@lru_cache(maxsize=64)
def options_of(asking: Asking) -> tuple[Option, ...]:
    """The plain run and the planner's answers to limits on the region's peak and on what it holds."""
    graph = asking.graph
    plain = asking.option(keep_everything(graph))
    found = {str(plain.schedule): plain}

    def ask(peak_bytes: int, rest_bytes: int) -> None:
        if (option := asking.answer(peak_bytes, rest_bytes)) is not None:
            found.setdefault(str(option.schedule), option)

    least = sum(graph.nodes[graph.roots[n]].output_bytes for n in graph.outputs)
    most = plain.peaks.held_bytes
    for i in range(_HELD):
        held = least + (most - least) * i // _HELD
        ask(plain.peaks.most_bytes + held, plain.peaks.most_bytes)
    floor = min(o.peaks.most_bytes for o in found.values())
    for part in (0.0, 0.5):
        ask(int(part * floor), 0)
        ask(int(part * floor), int(part * floor) - least)
    return tuple(found.values())


def _with_rest(graph: Graph, rest_bytes: int) -> Graph:
    """The graph and one operation more, which reads the outputs and needs so many bytes."""
    rest = Node(
        "the rest of the step",
        inputs=graph.outputs,
        saved=graph.outputs,
        forward_seconds=1e-9,
        backward_seconds=1e-9,
        forward_workspace_bytes=max(0, rest_bytes),
        backward_workspace_bytes=max(0, rest_bytes),
        gradient_bytes=1,
    )
    return replace(graph, nodes=(*graph.nodes, rest), outputs=(len(graph.nodes),))
