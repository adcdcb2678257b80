"""A graph at any batch size from its profiles at two: bytes and seconds grow linearly with the samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..plans.step_memory import HandedOn, Surroundings
from ..schedules.graph import Graph, Node, fields_in


@dataclass(frozen=True, slots=True)
class Line:
    """A quantity measured at two sizes and taken as linear in between and beyond.

    >>> Line(2, 4).through(110, 120)(10)
    150

    Attributes:
        small: The smaller size.
        large: The larger size.
    """

    small: int
    large: int

    def through(self, at_small: int, at_large: int) -> _Bytes:
        """The bytes as a function of the size, rounded up."""
        return _Bytes(self, at_small, at_large)

    def seconds(self, at_small: float, at_large: float, size: int) -> float:
        """Seconds at `size`; noise makes them neither fall with the size nor vanish."""
        slope = max(0.0, (at_large - at_small) / (self.large - self.small))
        fixed = max(0.0, at_large - slope * self.large)
        return fixed + slope * size


@dataclass(frozen=True, slots=True)
class _Bytes:
    line: Line
    at_small: int
    at_large: int

    def __call__(self, size: int) -> int:
        return max(0, self.signed(size))

    def signed(self, size: int) -> int:
        """The same for a difference of bytes, which may be negative."""
        rise, run = self.at_large - self.at_small, self.line.large - self.line.small
        return self.at_small - (-(size - self.line.small) * rise // run)


@dataclass(frozen=True, slots=True)
class ScalableGraph:
    """Profiles of one module at two batch sizes.

    Attributes:
        line: The two sizes.
        small: The profile at the smaller one.
        large: The profile at the larger one.

    Raises:
        ValueError: The profiles do not have the same operations: the module does something else at another size.
    """

    line: Line
    small: Graph
    large: Graph

    def __post_init__(self) -> None:
        if [(n.name, n.inputs) for n in self.small.nodes] != [(n.name, n.inputs) for n in self.large.nodes]:
            raise ValueError(
                f"the module runs {len(self.small.nodes)} operations at batch size {self.line.small} and "
                f"{len(self.large.nodes)} others at {self.line.large}: give a fixed batch_size"
            )

    def at(self, size: int) -> Graph:
        """The graph at a batch size: every field in bytes or seconds on its line, the operations as they are."""
        pairs = zip(self.small.nodes, self.large.nodes, strict=True)
        nodes = tuple(replace(b, **_quantities(self.line, a, b, size)) for a, b in pairs)
        inputs = tuple(
            replace(b, shape=tuple(self.line.through(m, n)(size) for m, n in zip(a.shape, b.shape, strict=True)))
            for a, b in zip(self.small.profiled_on, self.large.profiled_on, strict=True)
        )
        quantities = _quantities(self.line, self.small, self.large, size)
        return replace(self.large, nodes=nodes, profiled_on=inputs, **quantities)


_Measured = TypeVar("_Measured", Node, Graph)


def _quantities(line: Line, small: _Measured, large: _Measured, size: int) -> dict[str, Any]:
    """The fields that count bytes or seconds, at another size; None stands for what the others tell."""
    found: dict[str, Any] = {}
    for name in fields_in("bytes", type(large)):
        a, b = getattr(small, name), getattr(large, name)
        found[name] = None if a is None or b is None else line.through(a, b)(size)
    for name in fields_in("seconds", type(large)):
        found[name] = line.seconds(getattr(small, name), getattr(large, name), size)
    return found


def scaled_surroundings(line: Line, small: Surroundings, large: Surroundings, size: int) -> Surroundings:
    """What is alive beside the regions at a batch size."""
    return Surroundings(
        resident_bytes=line.through(small.resident_bytes, large.resident_bytes).signed(size),
        optimizer_step_bytes=line.through(small.optimizer_step_bytes, large.optimizer_step_bytes)(size),
        is_accumulating=large.is_accumulating,
        seconds=line.seconds(small.seconds, large.seconds, size),
        gathering=large.gathering,
        handed_on=_handed_on(line, small.handed_on, large.handed_on, size),
        order=large.order,
        over=large.over,
    )


def _handed_on(line: Line, small: HandedOn, large: HandedOn, size: int) -> HandedOn:
    during = zip(small.during_bytes, large.during_bytes, strict=True)
    passing = zip(small.passing_bytes, large.passing_bytes, strict=True)
    return HandedOn(
        tuple(line.through(a, b).signed(size) for a, b in during),
        tuple(line.through(a, b)(size) for a, b in passing),
    )


def extrapolated(excess: Sequence[tuple[int, int]], size: int) -> int:
    """Bytes by which a step of `size` samples will differ from its prediction, judged by steps that were measured.

    One step alone does not tell what part is constant. What was missing is taken to grow with the samples (tensors
    outside the regions, gaps between the pieces that an allocator hands out); what was predicted too much is not hoped
    for beyond that step. Two steps make a line, which noise may tilt: half of the answer is the line's.

    >>> extrapolated([(10, 100)], 5), extrapolated([(10, 100), (5, 80)], 10), extrapolated([(10, -40)], 20)
    (50, 130, -40)

    Args:
        excess: (batch size, bytes measured beyond the prediction) of steps of different sizes, in their order.
        size: The batch size in question.
    """
    if not excess:
        return 0
    last, at_last = excess[-1]
    growing = at_last * (size if at_last > 0 else min(size, last)) / last
    if len(excess) == 1:
        return math.ceil(growing)
    before, at_before = excess[-2]
    slope = max(0.0, (at_last - at_before) / (last - before))
    return math.ceil((growing + at_last + slope * (size - last)) / 2)
