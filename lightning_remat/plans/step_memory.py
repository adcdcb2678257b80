"""The memory of a whole training step: the regions' schedules one after the other, and what is alive around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..schedules.compiled import Ints
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

    @property
    def plain(self) -> Surroundings:
        """The same with every unit as the user has set it."""
        return self if self.gathering is None else replace(self, gathering=self.gathering.plain)

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
        unit_bytes: What units under `fully_shard` hold during each action, of what `memory_bytes` counts: gathered
            parameters, gradients, buffers.
    """

    memory_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    num_forward: int
    optimizer_step_bytes: int
    unit_bytes: tuple[int, ...]

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
    base, forward, backward = _levels([(r.key, r.graph) for r in regions], surroundings)
    memory: list[int] = []
    units: list[int] = []
    seconds: list[float] = []

    def add(beside: Beside, steps: _Phase, before: int, after: int, during: int) -> None:
        """A call's actions, and what is alive beside them; the first and the last have what is before and after it."""
        first = len(memory)
        memory.extend(beside.level_bytes + during + m for m, _ in steps)
        memory[first] = max(memory[first], beside.before_bytes + before)
        memory[-1] = max(memory[-1], beside.after_bytes + after)
        units.extend([0 if surroundings.gathering is None else beside.level_bytes] * len(steps))
        seconds.extend(s for _, s in steps)

    held = base  # and by the regions that have run, for their backward
    for beside, (steps, _, size) in zip(forward, phases, strict=True):
        add(beside, steps, held, held + size, held)
        held += size
    num_forward = len(memory)
    for beside, (_, steps, size) in zip(backward, reversed(phases), strict=True):
        held -= size
        add(beside, steps, held + size, held, held)
    return Timeline(tuple(memory), tuple(seconds), num_forward, surroundings.optimizer_step_bytes, tuple(units))


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


class StepPeaks:
    """The peak of each forward and of each backward of a step, for whatever schedules its regions have.

    Args:
        calls: Name and graph of each call's region, in order.
        surroundings: What is alive beside them.
    """

    def __init__(self, calls: Sequence[tuple[str, Graph]], surroundings: Surroundings) -> None:
        base, *levels = _levels(calls, surroundings)
        forward, backward = ([[b.level_bytes, b.before_bytes, b.after_bytes] for b in part] for part in levels)
        self._forward, self._backward = (base + np.array(part, np.int64).T for part in (forward, backward[::-1]))

    def of(self, forward_bytes: Ints, backward_bytes: Ints, held_bytes: Ints) -> Ints:
        """The peaks, those of the forwards first; their maximum is that of `step_timeline`.

        Args:
            forward_bytes: `RegionPeaks.forward_bytes` of each call's region by its schedule, in order; of shape
                (calls,), or (choices, calls) for several choices of schedules at once.
            backward_bytes: `RegionPeaks.backward_bytes`, likewise.
            held_bytes: `RegionPeaks.held_bytes`, likewise.

        Returns:
            Bytes, of shape (2 * calls,) or (choices, 2 * calls); backwards in the order of the calls.
        """
        after = np.cumsum(held_bytes, axis=-1)
        before = after - held_bytes  # what the regions before hold, in the forward and again in the backward
        (during, enters, leaves), (during_back, enters_back, leaves_back) = self._forward, self._backward
        forward = np.maximum(during + forward_bytes + before, np.maximum(enters + before, leaves + after))
        backward = np.maximum(
            during_back + backward_bytes + before, np.maximum(enters_back + after, leaves_back + before)
        )
        return np.concatenate([forward, backward], axis=-1)


def _levels(calls: Sequence[tuple[str, Graph]], surroundings: Surroundings) -> tuple[int, list[Beside], list[Beside]]:
    """What is alive throughout, beside each call's forward, and beside each backward, in the order in which they run.

    Args:
        calls: Name and graph of each.
        surroundings: What is alive beside all of them.
    """
    own = dict(calls)
    grads = {key: gradient_bytes(graph) for key, graph in own.items()}
    base = surroundings.resident_bytes + surroundings.correction_bytes
    base += sum(graph.static_bytes for graph in own.values()) + sum(graph.input_bytes for _, graph in calls)
    if surroundings.gathering is not None:
        gradients = [grads[key] for key, _ in calls]
        alone, accumulating = surroundings.is_alone, surroundings.is_accumulating
        return base, *beside_calls(surroundings.gathering, gradients, is_alone=alone, is_accumulating=accumulating)
    kept = 0 if surroundings.is_alone else sum(grads.values())
    arrived = kept if surroundings.is_accumulating else 0
    backward: list[Beside] = []
    done: set[str] = set()
    for key, _ in reversed(calls):
        backward.append(Beside(arrived))
        if not surroundings.is_accumulating and key not in done:
            done.add(key)
            arrived += grads[key]
    return base, [Beside(kept) for _ in calls], backward


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
    memory = (alive - static for alive in simulation.memory_bytes)
    steps: _Phase = list(zip(memory, simulation.action_seconds, strict=True))
    held = alive_after(graph, Schedule(actions[:first]), gradients=gradients) - static
    return steps[:first], steps[first:], held
