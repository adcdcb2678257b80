"""What sharded parameters add to a step: gathers with their buffers, full gradients, what is reduced and scattered."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Unit:
    """Bytes of the parameters of one unit under `fully_shard`, on one process.

    Attributes:
        full_bytes: The gathered parameters.
        buffer_bytes: What a gather receives, beside the parameters that it is copied to.
        cast_bytes: What a gather sends, where it is cast before.
        kept_bytes: What stays of the gathered parameters between forward and backward; all of them where the unit is
            not resharded after its forward.
        reduced_bytes: What gradients are copied to, to be reduced and scattered.
        scattered_bytes: The part of it that this process receives.
        cast_gradient_bytes: That part as gradients of the shards, where these have another type; else 0.
        outside_gradient_bytes: Full gradients of the unit's parameters that no region holds.
        outside_shard_bytes: The gradients of their shards, which the surroundings count as resident throughout.
        gather_seconds: What a second gather, before the backward, takes where the unit is resharded after its forward;
            None where it is not to be planned whether it is.
        plain_kept_bytes: What stays as the user has set it, where it has been planned otherwise.
    """

    full_bytes: int
    buffer_bytes: int
    cast_bytes: int
    kept_bytes: int
    reduced_bytes: int
    scattered_bytes: int
    cast_gradient_bytes: int
    outside_gradient_bytes: int
    outside_shard_bytes: int
    gather_seconds: float | None = None
    plain_kept_bytes: int | None = None

    @property
    def gradient_bytes(self) -> int:
        """The gradients of the shards."""
        return self.cast_gradient_bytes or self.scattered_bytes

    @property
    def kept_plainly(self) -> int:
        """Bytes that stay as the user has set it."""
        return self.kept_bytes if self.plain_kept_bytes is None else self.plain_kept_bytes


@dataclass(frozen=True, slots=True)
class Event:
    """A moment of a step's forward.

    Attributes:
        kind: Whether a unit's forward begins or ends, or a region is called.
        index: Of the unit; of the region's call in the order of the step.
        has_gradient: Of the beginning of a unit, whether its inputs have gradients: else its own gradients are reduced
            when the whole backward has ended.
    """

    kind: Literal["enter", "leave", "call"]
    index: int
    has_gradient: bool = True


@dataclass(frozen=True, slots=True)
class Gathering:
    """The sharded units of a step and the order in which they run.

    Attributes:
        units: The units.
        events: What happens in the forward; the backward is its reverse.
        holds_received: Whether in the forward what was received last is let go of only when the next gather has been
            copied to the parameters, and not before that copy.
    """

    units: tuple[Unit, ...]
    events: tuple[Event, ...]
    holds_received: bool = False

    @property
    def planned(self) -> dict[int, float]:
        """The units of which is planned whether they are resharded after their forward, and the seconds of that."""
        return {u: unit.gather_seconds for u, unit in enumerate(self.units) if unit.gather_seconds is not None}

    @property
    def seconds(self) -> float:
        """Of the second gathers that are planned."""
        return sum(price for u, price in self.planned.items() if not self.units[u].kept_bytes)

    @property
    def second_gathers(self) -> int:
        """Units that are gathered again for their backward."""
        return sum(unit.kept_bytes < unit.full_bytes for unit in self.units)

    def keeping(self, kept: Collection[int]) -> Gathering:
        """The same where of the planned units these stay gathered from forward to backward, and no others."""
        units = list(self.units)
        for u in self.planned:
            kept_bytes = units[u].full_bytes if u in kept else 0
            units[u] = replace(units[u], kept_bytes=kept_bytes, plain_kept_bytes=units[u].kept_plainly)
        return replace(self, units=tuple(units))

    @property
    def plain(self) -> Gathering:
        """The same as the user has set it."""
        return self.keeping([u for u in self.planned if self.units[u].kept_plainly])

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Gathering:
        """What `dataclasses.asdict` made a dictionary of."""
        units, events = tuple(Unit(**u) for u in data["units"]), tuple(Event(**e) for e in data["events"])
        return cls(units, events, data.get("holds_received", False))


@dataclass(slots=True)
class Beside:
    """What is alive beside the forward or the backward of one call of a region: gradients, or what units hold.

    Attributes:
        level_bytes: During the call.
        before_bytes: At most since the call before it, where units do something there.
        after_bytes: At most afterwards, until the next one, likewise; of the last one, until the end.
    """

    level_bytes: int = 0
    before_bytes: int = 0
    after_bytes: int = 0


def beside_calls(
    gathering: Gathering, gradients: Sequence[int], *, is_alone: bool, is_accumulating: bool
) -> tuple[list[Beside], list[Beside]]:
    """What the units hold beside each forward, and beside each backward in the order in which they run.

    Args:
        gathering: The units.
        gradients: Full bytes of the gradients of the parameters of each call's region.
        is_alone: Whether no gradients are alive before the backward.
        is_accumulating: Whether earlier gradients stay.
    """
    walk = _Walk(gathering, gradients)
    resident = sum(u.outside_shard_bytes for u in gathering.units)
    shards = 0 if is_alone else sum(u.gradient_bytes for u in gathering.units)
    walk.shard_gradients = shards - resident
    forward = walk.forward()
    walk.shard_gradients = (shards if is_accumulating else 0) - resident
    return forward, walk.backward(is_accumulating=is_accumulating)


@dataclass(slots=True)
class _Walk:
    """Follows FSDP2 through a step."""

    gathering: Gathering
    gradients: Sequence[int]
    shard_gradients: int = 0
    parameters: dict[int, int] = field(default_factory=dict[int, int])  # unit → bytes of what is gathered, or kept
    buffers: dict[int, int] = field(default_factory=dict[int, int])  # unit → what its gather has received
    full_gradients: dict[int, int] = field(default_factory=dict[int, int])
    retained: int = 0  # what was reduced last, until the next is
    phases: list[Beside] = field(default_factory=list[Beside])
    most: int = 0  # since the last call

    @property
    def now(self) -> int:
        """Bytes at this moment."""
        held = (self.parameters, self.buffers, self.full_gradients)
        return self.shard_gradients + self.retained + sum(sum(part.values()) for part in held)

    def note(self, extra_bytes: int = 0) -> None:
        self.most = max(self.most, self.now + extra_bytes)

    def call(self) -> None:
        """A region's turn: what has been since the call before belongs to both."""
        if self.phases:
            self.phases[-1].after_bytes = self.most
        self.phases.append(Beside(self.now, self.most))
        self.most = 0

    def close(self) -> list[Beside]:
        self.phases[-1].after_bytes, self.most = self.most, 0
        phases, self.phases = self.phases, []
        return phases

    def is_gathered(self, u: int) -> bool:
        return self.parameters.get(u, 0) == self.gathering.units[u].full_bytes

    def receive(self, u: int) -> None:
        """The gather of a unit begins, unless it has."""
        unit = self.gathering.units[u]
        if not self.is_gathered(u) and u not in self.buffers:
            self.buffers[u] = unit.buffer_bytes
            self.note(unit.cast_bytes)

    def unpack(self, u: int) -> None:
        """What was received is copied to the parameters."""
        if u in self.buffers:
            self.parameters[u] = self.parameters.get(u, 0) + self.gathering.units[u].full_bytes
            self.note()
            self.parameters[u] = self.gathering.units[u].full_bytes

    def forward(self) -> list[Beside]:
        depth, last = 0, -1
        for event in self.gathering.events:
            if event.kind == "call":
                self.call()
                continue
            u = event.index
            if event.kind == "enter":
                depth += 1
                if not self.is_gathered(u):
                    self.receive(u)
                    if self.gathering.holds_received:
                        self.unpack(u)
                    if last != u:
                        self.buffers.pop(last, None)  # that of the gather before is let go of only now
                    last = u
                    if not self.gathering.holds_received:
                        self.unpack(u)
                continue
            depth -= 1
            self.parameters[u] = self.gathering.units[u].kept_bytes
            if not depth:
                self.buffers.clear()
        return self.close()

    def backward(self, *, is_accumulating: bool) -> list[Beside]:
        events = self.gathering.events
        order = [event.index for event in events if event.kind == "leave"]
        last: list[int] = []
        inside: list[int] = []
        for event in reversed(events):
            if event.kind == "leave":
                self._begin(event.index, order)
                inside.append(event.index)
            elif event.kind == "call":
                self.call()
                if inside:
                    u = inside[-1]
                    self.full_gradients[u] = self.full_gradients.get(u, 0) + self.gradients[event.index]
            else:
                inside.pop()
                if event.has_gradient:
                    self._reduce(event.index, is_accumulating=is_accumulating)
                else:
                    last.append(event.index)
        for u in reversed(last):  # as they lie in the module
            self._reduce(u, is_accumulating=is_accumulating)
        self.note()
        return self.close()

    def _begin(self, u: int, order: list[int]) -> None:
        self.receive(u)
        self.unpack(u)
        self.buffers.pop(u, None)
        order.pop()
        if order:  # the unit that ended before this one, whose backward comes next, is gathered ahead
            self.receive(order[-1])
        self.full_gradients[u] = self.full_gradients.get(u, 0) + self.gathering.units[u].outside_gradient_bytes
        self.note()

    def _reduce(self, u: int, *, is_accumulating: bool) -> None:
        unit = self.gathering.units[u]
        self.parameters.pop(u, None)
        self.retained = 0
        if not self.full_gradients.get(u):
            return
        self.retained = unit.reduced_bytes
        self.note()
        self.full_gradients[u] = 0
        self.note(unit.scattered_bytes + unit.cast_gradient_bytes)
        if not is_accumulating:
            self.shard_gradients += unit.gradient_bytes
