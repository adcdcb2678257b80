"""The memory of a whole training step: the regions' schedules one after the other, and what is alive around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .graph import Graph
from .schedule import Schedule
from .simulator import simulate


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is alive on the device beside the rewritten regions.

    Attributes:
        resident_bytes: Alive throughout: parameters and buffers outside the regions with their gradients, optimizer
            state, the parts of the batch that no region reads.
        optimizer_step_bytes: The peak of the optimizer's own step.
        is_accumulating: Whether gradients stay alive during the backward (accumulation over several batches).
            Otherwise those of the step before are alive in the forward and zeroed before the backward.
        correction_bytes: What a measured step needed beyond the prediction (loss, metrics, rounding); may be negative.
    """

    resident_bytes: int
    optimizer_step_bytes: int
    is_accumulating: bool = False
    correction_bytes: int = 0

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
    own: dict[str, RegionCost] = {r.key: r for r in regions}
    grads = {key: gradient_bytes(r.graph) for key, r in own.items()}
    base = surroundings.resident_bytes + surroundings.correction_bytes
    base += sum(r.graph.static_bytes for r in own.values()) + sum(r.graph.input_bytes for r in regions)
    kept = sum(grads.values())
    phases = [_phases(r, surroundings.is_accumulating) for r in regions]
    memory: list[int] = []
    seconds: list[float] = []
    held = 0  # what the regions that have run hold for their backward
    for forward, _, resident in phases:
        memory += [base + kept + held + m for m, _ in forward]
        seconds += [s for _, s in forward]
        held += resident
    num_forward = len(memory)
    arrived = kept if surroundings.is_accumulating else 0
    done: set[str] = set()
    for region, (_, backward, resident) in zip(reversed(regions), reversed(phases), strict=True):
        held -= resident
        memory += [base + arrived + held + m for m, _ in backward]
        seconds += [s for _, s in backward]
        if not surroundings.is_accumulating and region.key not in done:
            done.add(region.key)
            arrived += grads[region.key]
    return Timeline(tuple(memory), tuple(seconds), num_forward, surroundings.optimizer_step_bytes)


_Phase = list[tuple[int, float]]


def _phases(region: RegionCost, is_accumulating: bool) -> tuple[_Phase, _Phase, int]:
    """(bytes beyond parameters, gradients and inputs, seconds) of each action; and what stays after the forward."""
    graph = region.graph
    simulation = simulate(graph, region.schedule, gradients="kept" if is_accumulating else "fresh")
    static = graph.static_bytes + graph.input_bytes + (gradient_bytes(graph) if is_accumulating else 0)
    actions = region.schedule.actions
    first = next((i for i, a in enumerate(actions) if a.kind == "B"), len(actions))
    steps: _Phase = []
    for action, alive in zip(actions, simulation.memory_bytes, strict=True):
        node = graph.nodes[action.node]
        duration = {"F": node.forward_seconds, "B": node.backward_seconds}.get(action.kind, 0.0)
        steps.append((alive - static, duration))
    resident = steps[first - 1][0] if first else 0  # the most alive in the last forward action bounds what stays
    return steps[:first], steps[first:], resident
