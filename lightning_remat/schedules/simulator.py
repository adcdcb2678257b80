"""Replays a schedule on a graph: the only judge of validity, peak memory and time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import ScheduleError, check_kind
from .gradients import GradientMemory
from .graph import Graph
from .schedule import ActionKind, Schedule, mark
from .uses import resting, resting_tapes

Gradients = Literal["fresh", "kept"]


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a schedule costs.

    Attributes:
        peak_bytes: The most memory alive at any moment: the maximum of `memory_bytes`.
        seconds: Time of all forward runs and backwards; of a step that was timed, with what is no operation's.
        recompute_seconds: The part of it that goes into second and later runs of a node, their stretches and hooks.
        memory_bytes: The timeline: the most alive during each action.
        action_seconds: Time of each action; none for a discard.
    """

    peak_bytes: int
    seconds: float
    recompute_seconds: float
    memory_bytes: tuple[int, ...]
    action_seconds: tuple[float, ...] = ()

    @property
    def peak_position(self) -> int:
        """Position of the first action at which the peak is reached."""
        return self.memory_bytes.index(self.peak_bytes)

    def corrected(self, excess_bytes: int, beside_seconds: float = 0.0) -> Simulation:
        """The same as executed steps were measured: with so many more bytes alive in every moment, and more seconds."""
        memory = tuple(alive + excess_bytes for alive in self.memory_bytes)
        peak, seconds = self.peak_bytes + excess_bytes, self.seconds + beside_seconds
        return replace(self, peak_bytes=peak, seconds=seconds, memory_bytes=memory)

    @property
    def recompute_overhead(self) -> float:
        """Recomputation as a fraction of the step without it."""
        plain = self.seconds - self.recompute_seconds
        return self.recompute_seconds / plain if plain > 0 else 0.0


def simulate(
    graph: Graph,
    schedule: Schedule,
    *,
    gradients: Gradients = "fresh",
    holds_outputs: bool = True,
    holds_let_go: bool = False,
) -> Simulation:
    """The cost of `schedule` on `graph`, after checking every rule of the schedule language.

    Args:
        graph: The operations and their costs.
        schedule: The actions, from the first forward to the last backward.
        gradients: `"fresh"`: parameter gradients appear with their backward. `"kept"`: they are alive throughout,
            as under accumulation, and each new contribution is transient.
        holds_outputs: Whether the outputs live until their own backward, as planners take it. Otherwise the loss lets
            go of them as soon as it has made their gradients.
        holds_let_go: Whether `Graph.let_go` lives to the end of the forward.

    Returns:
        Peak, seconds and the memory timeline.

    Raises:
        ScheduleError: The schedule breaks a rule; the message marks the action.
        TypeError: It is no graph, or no schedule.
    """
    check_kind(graph, Graph, "what profile returns")
    check_kind(schedule, Schedule, "that of a plan, or Schedule.parse of its text")
    if gradients not in ("fresh", "kept"):
        raise ValueError(f"gradients is {gradients!r}, expected 'fresh' or 'kept'")
    replay = Replay(graph, schedule, gradients, holds_outputs, holds_let_go=holds_let_go)
    timeline = tuple(replay.run())
    replay.finish()
    peak = max(timeline, default=replay.alive)
    seconds, again = math.fsum(replay.seconds), math.fsum(replay.recompute_seconds)
    return Simulation(peak, seconds, again, timeline, tuple(replay.seconds))


def alive_after(graph: Graph, schedule: Schedule, *, gradients: Gradients = "fresh") -> int:
    """Bytes alive after the actions of the beginning of a schedule.

    Raises:
        ScheduleError: It breaks a rule.
    """
    replay = Replay(graph, schedule, gradients)
    replay.run()
    return replay.alive


class Replay(GradientMemory):
    """Memory state between two actions: the storages of outputs, which views share, beside those of gradients."""

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        gradients: Gradients,
        holds_outputs: bool = True,
        *,
        holds_let_go: bool = False,
    ) -> None:
        super().__init__(graph, is_fresh=gradients == "fresh")
        self.schedule, self.holds_outputs = schedule, holds_outputs
        self.let_go = set(graph.let_go if holds_let_go else ())
        self.holding = self.let_go.union(graph.outputs)
        count = len(graph.nodes)
        self.alive = graph.input_bytes + graph.static_bytes
        if not self.is_fresh:
            self.alive += sum(n.parameter_bytes for n in graph.nodes)
        self.output: list[int | None] = [None] * count  # storage of the resident output
        self.tape = [False] * count
        self.has_run = [False] * count
        self.is_saved = [True] * count  # whether hooks need not hand over what its backward reads
        self.is_done = [False] * count
        rest, self.resting_tapes = resting(graph, schedule), resting_tapes(graph, schedule)
        self.by_hooks = [[i for i in node.saved if i not in rest or i not in node.held] for node in graph.nodes]
        self.savers: list[list[int]] = [[] for _ in graph.nodes]  # whom hooks hand over an output that goes
        for n, saved in enumerate(self.by_hooks):
            for i in saved:
                self.savers[i].append(n)
        self.pending_users = [len(u) for u in graph.users]
        self.held_output: dict[int, int] = {}  # outputs of the graph that the caller holds: node -> storage
        self.is_backward = False
        self.is_running_again = False  # in a stretch of recomputations
        self.seconds: list[float] = []  # of each action; summed once, exactly: their order must not show
        self.recompute_seconds: list[float] = []

    def run(self) -> list[int]:
        """Replays the actions; the most alive during each."""
        timeline: list[int] = []
        for position, (kind, n) in enumerate(self.schedule.actions):
            if n >= len(self.graph.nodes):
                raise self.error(position, f"the graph has no node {n}, only 0 to {len(self.graph.nodes) - 1}")
            timeline.append(self.step(kind, position, n))
        return timeline

    def step(self, kind: ActionKind, position: int, n: int) -> int:
        """Replays one action; the most alive during it."""
        if kind == "F":
            return self.forward(position, n)
        if kind == "B":
            return self.backward(position, n)
        self.seconds.append(0.0)
        return self.discard_output(position, n) if kind == "D" else self.discard_tape(position, n)

    def error(self, position: int, reason: str) -> ScheduleError:
        name = ""
        if position < len(self.schedule):
            node = self.schedule.actions[position].node
            if node < len(self.graph.nodes):
                name = f" ({self.graph.nodes[node].name})"
        marked = mark(self.schedule.actions, position)
        return ScheduleError(f"{marked}\naction {position}{name}: {reason}", position=position)

    def _name(self, node: int) -> str:
        return f"node {node} ({self.graph.nodes[node].name})"

    def forward(self, position: int, n: int) -> int:
        node = self.graph.nodes[n]
        for i in node.inputs:
            if self.output[i] is None:
                raise self.error(position, f"reads the output of {self._name(i)}, which is not resident")
        has_output = self.output[n] is not None
        if has_output and (self.tape[n] or not node.tape_bytes):
            raise self.error(position, "its output and its tape are resident already")
        # A run always makes both; what is resident already exists twice until the action ends.
        most = self.alive + node.output_bytes + node.tape_bytes + node.forward_workspace_bytes
        if not has_output:
            self.output[n] = storage = self._output_storage(position, n)
            if n in self.holding and n not in self.held_output and not self.is_done[n]:
                self.held_output[n] = storage
                self.holders[storage] += 1
        brings_tape = bool(node.tape_bytes) and not self.tape[n]
        if brings_tape:
            self.tape[n] = True
            self.alive += node.tape_bytes
        seconds = node.forward_seconds
        if self.has_run[n]:
            seconds = node.rerun_seconds + (0.0 if self.is_running_again else node.stretch_price)
            seconds += node.tape_price if brings_tape else 0.0
            self.recompute_seconds.append(seconds)
        elif any(self.output[i] is None for i in self.by_hooks[n]):  # of a tuple that has gone, whose item it reads
            self.is_saved[n] = False
        self.is_running_again = self.has_run[n]
        self.seconds.append(seconds)
        self.has_run[n] = True
        return most

    def _output_storage(self, position: int, n: int) -> int:
        base = self.graph.nodes[n].storage_of
        if base is None:
            return self.allocate(self.graph.nodes[n].output_bytes)
        storage = self.output[base]
        if storage is None:
            raise self.error(position, f"views the output of {self._name(base)}, which is not resident")
        self.holders[storage] += 1
        return storage

    def discard_output(self, position: int, n: int) -> int:
        storage = self.output[n]
        if storage is None:
            raise self.error(position, "its output is not resident")
        most = self.alive
        self.output[n] = None
        self.release(storage)
        for m in self.savers[n]:
            if self.has_run[m]:
                self.is_saved[m] = False
        return most

    def discard_tape(self, position: int, n: int) -> int:
        if not self.tape[n]:
            has_tape = self.graph.nodes[n].tape_bytes > 0
            raise self.error(position, "its tape is not resident" if has_tape else "it has no tape")
        most = self.alive
        self.tape[n] = False
        if n not in self.resting_tapes:
            self.is_saved[n] = False
        self.alive -= self.graph.nodes[n].tape_bytes
        return most

    def backward(self, position: int, n: int) -> int:
        graph, node = self.graph, self.graph.nodes[n]
        if self.is_done[n]:
            raise self.error(position, "its backward has run already")
        if not self.has_run[n]:
            raise self.error(position, "it has not run forward")
        if self.pending_users[n]:
            user = next(u for u in graph.users[n] if not self.is_done[u])
            raise self.error(position, f"the backward of its user {self._name(user)} has not run")
        for i in node.saved:
            if self.output[i] is None:
                raise self.error(position, f"its backward reads the output of {self._name(i)}, which is not resident")
        if node.tape_bytes and not self.tape[n]:
            raise self.error(position, "its backward reads its tape, which is not resident")
        at_loss = 0 if self.is_backward else self.begin_backward()
        most = self.propagate(n, is_released=self._is_released(position, n))
        if not self.holds_outputs:  # else more is alive from here on than at the loss
            most = max(most, at_loss)
        self.is_done[n] = True
        for i in set(node.inputs):
            self.pending_users[i] -= 1
        if n in self.held_output:
            self.release(self.held_output.pop(n))
        self.is_running_again = False
        hook_price = 0.0 if self.is_saved[n] else node.hook_price
        self.recompute_seconds.append(hook_price)
        self.seconds.append(node.backward_seconds + hook_price)
        return most

    def begin_backward(self) -> int:
        """The loss makes the gradients of all that leaves the graph; what is alive then."""
        self.is_backward = True
        for n in self.held_output.keys() & self.let_go:
            self.release(self.held_output.pop(n))
        most = super().begin_backward()
        if not self.holds_outputs:
            for storage in self.held_output.values():
                self.release(storage)
            self.held_output.clear()
        return most

    def _is_released(self, position: int, n: int) -> bool:
        """Whether a backward of several operations lets go of its own output and tape on the way: none is to stay."""
        node = self.graph.nodes[n]
        if n in self.held_output:
            return False
        staying = {("D", n)} if n in node.saved else set[tuple[str, int]]()
        if node.tape_bytes:
            staying.add(("T", n))
        actions = self.schedule.actions
        while staying and position + 1 < len(actions) and actions[position + 1].kind in "DT":
            position += 1
            staying.discard(actions[position])
        return not staying

    def finish(self) -> None:
        """Raises ScheduleError where the end of the schedule leaves something undone or resident."""
        end = len(self.schedule)
        for n in range(len(self.graph.nodes)):
            if not self.is_done[n]:
                raise self.error(end, f"ends without the backward of {self._name(n)}")
            if self.output[n] is not None:
                raise self.error(end, f"ends with the output of {self._name(n)} resident")
            if self.tape[n]:
                raise self.error(end, f"ends with the tape of {self._name(n)} resident")
