"""The memory of a whole training step: the regions' schedules one after the other, and what is alive around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ..schedules.simulator import alive_after, simulate


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is alive on the device beside the rewritten regions.

    Attributes:
        resident_bytes: Alive throughout: parameters and buffers outside the regions with their gradients, optimizer
            state, the parts of the batch that no region reads, what the code between the regions saves; less what the
            regions count more than once.
        optimizer_step_bytes: The peak of the optimizer's own step.
        is_accumulating: Whether gradients stay alive during the backward (accumulation over several batches).
            Otherwise those of the step before are alive in the forward and zeroed before the backward.
        seconds: Duration of the optimizer's step, a batch's part of it where several batches share one.
        correction_bytes: What a measured step needed beyond the prediction (loss, metrics, rounding); may be negative.
        is_alone: Whether no gradients are alive before the backward: one step by itself, as `rematerialize` counts it.
    """

    resident_bytes: int
    optimizer_step_bytes: int
    is_accumulating: bool = False
    seconds: float = 0.0
    correction_bytes: int = 0
    is_alone: bool = False

    def corrected(self, excess_bytes: int) -> Surroundings:
        """The same, with `excess_bytes` more in every moment of forward and backward."""
        return replace(self, correction_bytes=self.correction_bytes + excess_bytes)


@dataclass(frozen=True, slots=True)
class RegionCost:
    """One call of a region in a step, with the schedule that it runs by.

    Attributes:
        key: Names the region; two calls of one module share parameters and bear one key.
        graph: Its operations.
        schedule: What is run, kept, discarded and recomputed.
    """

    key: str
    graph: Graph
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class Timeline:
    """Memory of one training step, action by action.

    Attributes:
        memory_bytes: The most alive during each action, everything counted.
        seconds: Duration of each action; 0 for a discard.
        num_forward: Actions before the first backward.
        optimizer_step_bytes: The peak of the optimizer's step, which follows.
    """

    memory_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    num_forward: int
    optimizer_step_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The peak of the whole step."""
        return max(*self.memory_bytes, self.optimizer_step_bytes)


def gradient_bytes(graph: Graph) -> int:
    """Bytes of the gradients of the region's parameters."""
    return sum(node.parameter_bytes for node in graph.nodes)


def step_timeline(regions: Sequence[RegionCost], surroundings: Surroundings) -> Timeline:
    """The memory timeline of a training step from the second on, when optimizer state and gradients exist.

    Regions run forward in the given order and backward in reverse.
    """
    phases = [_phases(r, surroundings.is_accumulating) for r in regions]
    calls = [(r.key, r.graph, held) for r, (_, _, held) in zip(regions, phases, strict=True)]
    forward, backward = _levels(calls, surroundings)
    memory: list[int] = []
    seconds: list[float] = []
    for level, (steps, _, _) in zip(forward, phases, strict=True):
        memory += [level + m for m, _ in steps]
        seconds += [s for _, s in steps]
    num_forward = len(memory)
    for level, (_, steps, _) in zip(backward, reversed(phases), strict=True):
        memory += [level + m for m, _ in steps]
        seconds += [s for _, s in steps]
    return Timeline(tuple(memory), tuple(seconds), num_forward, surroundings.optimizer_step_bytes)


@dataclass(frozen=True, slots=True)
class RegionPeaks:
    """What a region needs by a schedule, beyond its parameters, gradients and inputs.

    Attributes:
        forward_bytes: The peak of its forward.
        backward_bytes: The peak of its backward.
        held_bytes: What it holds in between.
    """

    forward_bytes: int
    backward_bytes: int
    held_bytes: int

    @property
    def most_bytes(self) -> int:
        """Its peak."""
        return max(self.forward_bytes, self.backward_bytes)


def region_peaks(region: RegionCost, is_accumulating: bool) -> RegionPeaks:
    """The peaks of a region by its schedule."""
    forward, backward, held = _phases(region, is_accumulating)
    return RegionPeaks(max(m for m, _ in forward), max(m for m, _ in backward), held)


def peaks_of_phases(calls: Sequence[tuple[str, Graph, RegionPeaks]], surroundings: Surroundings) -> list[int]:
    """The peak of each forward and of each backward of a step; their maximum is that of `step_timeline`."""
    forward, backward = _levels([(key, graph, p.held_bytes) for key, graph, p in calls], surroundings)
    return [
        *(level + p.forward_bytes for level, (_, _, p) in zip(forward, calls, strict=True)),
        *(level + p.backward_bytes for level, (_, _, p) in zip(backward, reversed(calls), strict=True)),
    ]


def _levels(calls: Sequence[tuple[str, Graph, int]], surroundings: Surroundings) -> tuple[list[int], list[int]]:
    """What is alive beside each call's forward, and beside each backward, in the order in which they run.

    Args:
        calls: Name, graph, and bytes held between forward and backward, of each.
        surroundings: What is alive beside all of them.
    """
    own = {key: graph for key, graph, _ in calls}
    grads = {key: gradient_bytes(graph) for key, graph in own.items()}
    base = surroundings.resident_bytes + surroundings.correction_bytes
    base += sum(graph.static_bytes for graph in own.values()) + sum(graph.input_bytes for _, graph, _ in calls)
    kept = 0 if surroundings.is_alone else sum(grads.values())
    held = 0  # by the regions that have run, for their backward
    forward: list[int] = []
    for _, _, size in calls:
        forward.append(base + kept + held)
        held += size
    arrived = kept if surroundings.is_accumulating else 0
    backward: list[int] = []
    done: set[str] = set()
    for key, _, size in reversed(calls):
        held -= size
        backward.append(base + arrived + held)
        if not surroundings.is_accumulating and key not in done:
            done.add(key)
            arrived += grads[key]
    return forward, backward


def forward_length(schedule: Schedule, num_nodes: int) -> int:
    """The number of actions of the forward: up to the last first run, and the discards that follow it."""
    has_run: set[int] = set()
    for position, action in enumerate(schedule):
        if len(has_run) == num_nodes and action.kind in "FB":
            return position
        has_run.add(action.node)
    return len(schedule.actions)


_Phase = list[tuple[int, float]]


def _phases(region: RegionCost, is_accumulating: bool) -> tuple[_Phase, _Phase, int]:
    """(bytes beyond parameters, gradients and inputs, seconds) of each action; and what stays after the forward."""
    graph = region.graph
    gradients = "kept" if is_accumulating else "fresh"
    simulation = simulate(graph, region.schedule, gradients=gradients)
    static = graph.static_bytes + graph.input_bytes + (gradient_bytes(graph) if is_accumulating else 0)
    actions = region.schedule.actions
    first = forward_length(region.schedule, len(graph.nodes))
    steps: _Phase = []
    for action, alive in zip(actions, simulation.memory_bytes, strict=True):
        node = graph.nodes[action.node]
        duration = {"F": node.forward_seconds, "B": node.backward_seconds}.get(action.kind, 0.0)
        steps.append((alive - static, duration))
    held = alive_after(graph, Schedule(actions[:first]), gradients=gradients) - static
    return steps[:first], steps[first:], held
