"""The memory of a whole training step: the regions' schedules one after the other, and what is alive around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np

from ..schedules.compiled import Ints
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ..schedules.simulator import alive_after, simulate
from .gathering import Beside, Gathering, beside_calls


@dataclass(frozen=True, slots=True)
class HandedOn:
    """What comes into the calls of a step and leaves them, which is neither its batch nor a parameter nor a buffer.

    Attributes:
        during_bytes: What is alive of it during each forward and backward, in the order in which they run, less what
            is told of the call, and what calls count as held that has gone; may be negative. Empty where there is none.
        passing_bytes: Of each call, what comes into it that nothing saves: it is alive during the call's forward, and
            goes on living until its backward where something is recomputed from it. Empty where there is none.
    """

    during_bytes: tuple[int, ...] = ()
    passing_bytes: tuple[int, ...] = ()

    def during(self, num_calls: int) -> tuple[int, ...]:
        """`during_bytes` of a step of so many calls."""
        return self.during_bytes or (0,) * (2 * num_calls)

    def passing(self, num_calls: int) -> tuple[int, ...]:
        """`passing_bytes` of a step of so many calls."""
        return self.passing_bytes or (0,) * num_calls


def turns_of(order: tuple[int, ...], num_calls: int) -> tuple[int, ...]:
    """The order of the forwards and backwards of a step; see `Surroundings.order`."""
    return order or (*range(num_calls), *(~k for k in reversed(range(num_calls))))


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
        order: Of a step with several backwards, in which order its calls run: a call's number stands for its forward,
            the number's complement (`~`) for its backward. Empty where all run forward, then backward in reverse.
        over: The numbers of calls to which no backward comes, as what they return is detached. The turns of
            their backwards are where this has been read, with which dies what they hold.
        handed_on: What comes into the regions and leaves them, beside the batch.
    """

    resident_bytes: int
    optimizer_step_bytes: int
    is_accumulating: bool = False
    seconds: float = 0.0
    correction_bytes: int = 0
    is_alone: bool = False
    gathering: Gathering | None = None
    order: tuple[int, ...] = ()
    over: tuple[int, ...] = ()
    handed_on: HandedOn = HandedOn()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Surroundings:
        """What `dataclasses.asdict` made a dictionary of."""
        values: dict[str, Any] = dict(data)
        if values.get("gathering") is not None:
            values["gathering"] = Gathering.from_dict(values["gathering"])
        values |= {name: tuple(values.get(name, ())) for name in ("order", "over")}
        between: dict[str, Any] = values.get("handed_on", {})
        values["handed_on"] = HandedOn(**{name: tuple(figures) for name, figures in between.items()})
        return cls(**values)

    def turns(self, num_calls: int) -> tuple[int, ...]:
        """The order of a step of so many calls."""
        return turns_of(self.order, num_calls)

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
        passing_bytes: As of `HandedOn`.
        is_over: Whether no backward comes to it.
    """

    key: str
    graph: Graph
    schedule: Schedule
    passing_bytes: int = 0
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Timeline:
    """Memory of one training step, action by action.

    Attributes:
        memory_bytes: The most alive during each action, everything counted.
        seconds: Duration of each action; 0 for a discard.
        num_forward: Actions before the first backward.
        optimizer_step_bytes: The peak of the optimizer's step, which follows.
        gradient_bytes: Of what `memory_bytes` counts, gradients of parameters: of the step before, then those that have
            come. Where parameters are sharded, all that units under `fully_shard` hold: gathered ones and buffers too.
        handed_on_bytes: Likewise, what comes into the regions beside the batch, as `HandedOn.during_bytes` tells it.
    """

    memory_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    num_forward: int
    optimizer_step_bytes: int
    gradient_bytes: tuple[int, ...]
    handed_on_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """The peak of the whole step."""
        return max(*self.memory_bytes, self.optimizer_step_bytes)


def gradient_bytes(graph: Graph) -> int:
    """Bytes of the gradients of the region's parameters."""
    return sum(node.parameter_bytes for node in graph.nodes)


def step_timeline(regions: Sequence[RegionCost], surroundings: Surroundings) -> Timeline:
    """The memory timeline of a training step from the second on, when optimizer state and gradients exist.

    Regions run in the order of the surroundings.
    """
    parts = [_forward_and_backward(r, surroundings.keeps_gradients) for r in regions]
    turns = surroundings.turns(len(regions))
    base, levels = _levels([(r.key, r.graph) for r in regions], surroundings)
    memory: list[int] = []
    gradients: list[int] = []
    handed_on: list[int] = []
    seconds: list[float] = []
    num_forward, has_turned, is_sharded = 0, False, surroundings.gathering is not None
    held = base  # and by the regions that have run, for their backward
    for turn, beside, between in zip(turns, levels, surroundings.handed_on.during(len(regions)), strict=True):
        forward, backward, size = parts[max(turn, ~turn)]
        steps, before, after = (forward, 0, size) if turn >= 0 else (backward, size, 0)
        held -= before
        first, there = len(memory), held + between
        memory.extend(beside.level_bytes + there + step.alive_bytes for step in steps)
        memory[first] = max(memory[first], beside.before_bytes + there + before)
        memory[-1] = max(memory[-1], beside.after_bytes + there + after)
        gradients.extend(beside.level_bytes + (0 if is_sharded else step.gradient_bytes) for step in steps)
        handed_on.extend([between] * len(steps))
        seconds.extend(step.seconds for step in steps)
        held += after
        if turn >= 0 and not has_turned:
            num_forward = len(memory)
        has_turned |= turn < 0 and ~turn not in surroundings.over
    figures = surroundings.optimizer_step_bytes, tuple(gradients), tuple(handed_on)
    return Timeline(tuple(memory), tuple(seconds), num_forward, *figures)


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

    @property
    def of_forward(self) -> RegionPeaks:
        """Those of a region to which no backward comes."""
        return RegionPeaks(self.forward_bytes, 0, self.held_bytes)

    def reading(self, passing_bytes: int, *, recomputes: bool) -> RegionPeaks:
        """Those of a region into which so much comes that nothing saves, and from which it recomputes or not."""
        later = passing_bytes if recomputes else 0
        return RegionPeaks(self.forward_bytes + passing_bytes, self.backward_bytes + later, self.held_bytes + later)


def region_peaks(region: RegionCost, is_accumulating: bool) -> RegionPeaks:
    """The peaks of a region by its schedule."""
    forward, backward, held = _forward_and_backward(region, is_accumulating)
    return RegionPeaks(max(s.alive_bytes for s in forward), max(s.alive_bytes for s in backward), held)


class StepPeaks:
    """The peak of each forward and of each backward of a step, for whatever schedules its regions have.

    Args:
        calls: Name and graph of each call's region, in order.
        surroundings: What is alive beside them.
    """

    def __init__(self, calls: Sequence[tuple[str, Graph]], surroundings: Surroundings) -> None:
        base, levels = _levels(calls, surroundings)
        turns: Ints = np.array(surroundings.turns(len(calls)))
        between: Ints = base + np.array(surroundings.handed_on.during(len(calls)))
        self._levels: Ints = between + np.array([[b.level_bytes, b.before_bytes, b.after_bytes] for b in levels]).T
        self._is_forward = turns >= 0
        self._call = np.maximum(turns, ~turns)
        self._place = np.argsort(np.where(self._is_forward, turns, len(calls) + self._call))

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
        own: Ints = np.where(self._is_forward, forward_bytes[..., self._call], backward_bytes[..., self._call])
        comes: Ints = np.where(self._is_forward, held_bytes[..., self._call], 0)
        goes = held_bytes[..., self._call] - comes
        others = np.cumsum(comes - goes, axis=-1) - comes  # what the other regions hold meanwhile
        during, enters, leaves = self._levels
        peaks = others + np.maximum(during + own, np.maximum(enters + goes, leaves + comes))
        return peaks[..., self._place]


def _levels(calls: Sequence[tuple[str, Graph]], surroundings: Surroundings) -> tuple[int, list[Beside]]:
    """What is alive throughout, and beside each call's forward or backward, in the order in which they run.

    A backward begins without the gradients that it makes, unless these accumulate; those of other regions stay.

    Args:
        calls: Name and graph of each.
        surroundings: What is alive beside all of them.
    """
    own = dict(calls)
    awaited = {key for k, (key, _) in enumerate(calls) if k not in surroundings.over}
    grads = {key: gradient_bytes(graph) if key in awaited else 0 for key, graph in own.items()}
    base = surroundings.resident_bytes + surroundings.correction_bytes
    base += sum(graph.static_bytes for graph in own.values()) + sum(graph.input_bytes for _, graph in calls)
    accumulates = surroundings.is_accumulating
    if surroundings.gathering is not None:
        gradients = [grads[key] for key, _ in calls]
        alone = surroundings.is_alone
        parts = beside_calls(surroundings.gathering, gradients, is_alone=alone, is_accumulating=accumulates)
        return base, [beside for part in parts for beside in part]
    there = dict.fromkeys(grads, 0) if surroundings.is_alone else dict(grads)
    levels: list[Beside] = []
    for is_forward, turns in groupby(surroundings.turns(len(calls)), lambda turn: turn >= 0):
        keys = [calls[max(turn, ~turn)][0] for turn in turns]
        if not is_forward and not accumulates:
            there |= dict.fromkeys(keys, 0)
        for key in keys:
            levels.append(Beside(sum(there.values())))
            if not is_forward and not accumulates:
                there[key] = grads[key]
    return base, levels


def forward_length(schedule: Schedule, num_nodes: int) -> int:
    """The number of actions of the forward: up to the last first run, and the discards that follow it."""
    has_run: set[int] = set()
    for position, action in enumerate(schedule):
        if len(has_run) == num_nodes and action.kind in "FB":
            return position
        has_run.add(action.node)
    return len(schedule.actions)


class _Step(NamedTuple):
    """An action: bytes beyond parameters, inputs and gradients that are there; seconds; bytes of gradients so far."""

    alive_bytes: int
    seconds: float
    gradient_bytes: int


def _forward_and_backward(region: RegionCost, is_accumulating: bool) -> tuple[list[_Step], list[_Step], int]:
    """The actions of a region's forward, those of its backward, and the bytes that stay in between."""
    graph = region.graph
    gradients = "kept" if is_accumulating else "fresh"
    simulation = simulate(graph, region.schedule, gradients=gradients, holds_let_go=True)
    static = graph.static_bytes + graph.input_bytes + (gradient_bytes(graph) if is_accumulating else 0)
    actions = region.schedule.actions
    first = forward_length(region.schedule, len(graph.nodes))
    memory = (alive - static for alive in simulation.memory_bytes)
    come = accumulate(0 if is_accumulating or kind != "B" else graph.nodes[n].parameter_bytes for kind, n in actions)
    steps = [_Step(*step) for step in zip(memory, simulation.action_seconds, come, strict=True)]
    held = alive_after(graph, Schedule(actions[:first]), gradients=gradients) - static
    if region.passing_bytes:
        reads = len(steps) if region.schedule.recomputes else first
        held += region.passing_bytes if region.schedule.recomputes else 0
        steps[:reads] = (step._replace(alive_bytes=step.alive_bytes + region.passing_bytes) for step in steps[:reads])
    if region.is_over:
        steps[first:] = [_Step(0, 0.0, 0)] * (len(steps) - first)
    return steps[:first], steps[first:], held
