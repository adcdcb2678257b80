"""The memory of a whole training step: the regions' schedules one after the other, and what is alive around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ..schedules.simulator import alive_after, simulate
from .gathering import Beside, Gathering, beside_calls


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
        gathering: What sharded parameters add, where the regions' are: of those, no more than their shards count then
            among the regions' own.
    """

    resident_bytes: int
    optimizer_step_bytes: int
    is_accumulating: bool = False
    seconds: float = 0.0
    correction_bytes: int = 0
    is_alone: bool = False
    gathering: Gathering | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Surroundings:
        """What `dataclasses.asdict` made a dictionary of."""
        values: dict[str, Any] = dict(data)
        if values.get("gathering") is not None:
            values["gathering"] = Gathering.from_dict(values["gathering"])
        return cls(**values)

    @property
    def keeps_gradients(self) -> bool:
        """Whether the regions add to gradients that are there: full ones of shards are reduced in every backward."""
        return self.is_accumulating and self.gathering is None

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
    phases = [_phases(r, surroundings.keeps_gradients) for r in regions]
    calls = [(r.key, r.graph, held) for r, (_, _, held) in zip(regions, phases, strict=True)]
    forward, backward = _levels(calls, surroundings)
    memory: list[int] = []
    seconds: list[float] = []
    for level, (steps, _, _) in zip(forward, phases, strict=True):
        memory += level.with_calls([m for m, _ in steps])
        seconds += [s for _, s in steps]
    num_forward = len(memory)
    for level, (_, steps, _) in zip(backward, reversed(phases), strict=True):
        memory += level.with_calls([m for m, _ in steps])
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
        *(level.peak(p.forward_bytes) for level, (_, _, p) in zip(forward, calls, strict=True)),
        *(level.peak(p.backward_bytes) for level, (_, _, p) in zip(backward, reversed(calls), strict=True)),
    ]


@dataclass(frozen=True, slots=True)
class _Level:
    """What is alive beside a call's forward or backward.

    Attributes:
        during_bytes: What its own memory comes on top of.
        before_bytes: The most that is alive right before it.
        after_bytes: The most that is alive right after it.
    """

    during_bytes: int
    before_bytes: int = 0
    after_bytes: int = 0

    def peak(self, own_bytes: int) -> int:
        """The most alive from before it to after it."""
        return max(self.during_bytes + own_bytes, self.before_bytes, self.after_bytes)

    def with_calls(self, own: list[int]) -> list[int]:
        """The most alive in each of its actions; the first and the last have what is before and after it."""
        memory = [self.during_bytes + m for m in own]
        memory[0], memory[-1] = max(memory[0], self.before_bytes), max(memory[-1], self.after_bytes)
        return memory


def _levels(calls: Sequence[tuple[str, Graph, int]], surroundings: Surroundings) -> tuple[list[_Level], list[_Level]]:
    """What is alive beside each call's forward, and beside each backward, in the order in which they run.

    Args:
        calls: Name, graph, and bytes held between forward and backward, of each.
        surroundings: What is alive beside all of them.
    """
    own = {key: graph for key, graph, _ in calls}
    grads = {key: gradient_bytes(graph) for key, graph in own.items()}
    around_forward: Sequence[Beside | None] = [None] * len(calls)
    around_backward = around_forward
    if surroundings.gathering is not None:
        around_forward, around_backward = beside_calls(
            surroundings.gathering,
            [grads[key] for key, _, _ in calls],
            is_alone=surroundings.is_alone,
            is_accumulating=surroundings.is_accumulating,
        )
        grads = dict.fromkeys(grads, 0)
    base = surroundings.resident_bytes + surroundings.correction_bytes
    base += sum(graph.static_bytes for graph in own.values()) + sum(graph.input_bytes for _, graph, _ in calls)
    kept = 0 if surroundings.is_alone else sum(grads.values())
    held = 0  # by the regions that have run, for their backward
    forward: list[_Level] = []
    for beside, (_, _, size) in zip(around_forward, calls, strict=True):
        forward.append(_level(base + kept, held, held + size, beside))
        held += size
    arrived = kept if surroundings.is_accumulating else 0
    backward: list[_Level] = []
    done: set[str] = set()
    for beside, (key, _, size) in zip(around_backward, reversed(calls), strict=True):
        held -= size
        backward.append(_level(base + arrived, held + size, held, beside, during=held))
        if not surroundings.is_accumulating and key not in done:
            done.add(key)
            arrived += grads[key]
    return forward, backward


def _level(base: int, before: int, after: int, beside: Beside | None, during: int | None = None) -> _Level:
    """The level of a call, with what regions hold before, after and during it."""
    during = before if during is None else during
    if beside is None:
        return _Level(base + during)
    return _Level(
        base + during + beside.level_bytes,
        base + before + beside.before_bytes,
        base + after + beside.after_bytes,
    )


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
