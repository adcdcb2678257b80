"""Static memory allocation: every value of a step gets its place before the step runs."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_remat import Graph, Schedule
from lightning_remat.lowering import keep_everything, lower_kept
from lightning_remat.planners.chen import mirrored, search
from lightning_remat.schedules.edges import articulation_points
from lightning_remat.schedules.kinds import consists_of
from lightning_remat.schedules.storages import merge_views
from remat_recipes.papers.lifetimes import Value, lifetimes

Strategy = Literal["none", "inplace", "sharing", "drop_bn_relu", "sublinear"]

DROPPED_KINDS = frozenset(["batch_norm", "relu", "relu_"])
"""What `drop_bn_relu` recomputes; a fused node if all its parts are among them."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Where each value of a step lives.

    Attributes:
        strategy: How places were given.
        schedule: The step.
        values: Its values, in the order in which they are made.
        buffers: The buffer of each value.
        buffer_bytes: The size of each buffer.
        offsets: The address of each value: where its buffer begins.
        total_bytes: The memory of all buffers, which stand one after the other.
    """

    strategy: Strategy
    schedule: Schedule
    values: tuple[Value, ...]
    buffers: tuple[int, ...]
    buffer_bytes: tuple[int, ...]
    offsets: tuple[int, ...]
    total_bytes: int


def allocate(graph: Graph, strategy: Strategy = "sharing", *, schedule: Schedule | None = None) -> Allocation:
    """The buffers of a training step, without parameters, workspaces and inputs, as the paper counts memory.

    `none` gives every value its own buffer; `inplace` writes the result of an operation element by element over an
    operand that nothing needs afterwards; `sharing` also gives the buffer of a dead value to a new one.
    `drop_bn_relu` and `sublinear` do both for a step that recomputes: the results of batch norm and ReLU, or what the
    plan of Algorithm 3 drops that needs the least memory by this very allocation. The cost is about that of sorting
    the values.

    Args:
        graph: The operations.
        strategy: One of the five above.
        schedule: The step; None stands for the plain one, or for the one that the strategy makes.

    Raises:
        ValueError: The strategy is unknown, or makes its own schedule and another one is given.

    Reference: Chen et al. 2016, section 3 and Figure 2 (in-place, sharing), 5.1 (the five strategies).
    """
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy is {strategy!r}, expected one of {', '.join(get_args(Strategy))}")
    if strategy in ("drop_bn_relu", "sublinear"):
        if schedule is not None:
            raise ValueError(f"strategy {strategy!r} makes its own schedule: leave out `schedule`, or use 'sharing'")
        left = {n for n, node in enumerate(graph.nodes) if not consists_of(node, DROPPED_KINDS)}
        candidates = _sublinear(graph) if strategy == "sublinear" else iter([lower_kept(graph, left)])
        return min((_assign(graph, strategy, s) for s in candidates), key=lambda allocation: allocation.total_bytes)
    return _assign(graph, strategy, schedule or keep_everything(graph))


def _sublinear(graph: Graph) -> Iterator[Schedule]:
    """The plans of the paper's search over the budget of a segment, with the last segment kept and not."""
    storages = merge_views(graph)
    candidates = articulation_points(len(storages.owners), storages.edges)
    for m in dict.fromkeys(plan.m for plan in search(storages.sizes, candidates)):
        yield from mirrored(graph, storages, m)


def _assign(graph: Graph, strategy: Strategy, schedule: Schedule) -> Allocation:
    values = lifetimes(graph, schedule)
    pool = _Pool(is_shared=strategy not in ("none", "inplace"))
    buffers: list[int] = []
    for value in values:
        over = None if strategy == "none" else _overwritten(value, values, buffers, pool)
        if over is None:
            buffers.append(pool.take(value))
        else:
            buffers.append(buffers[over])
            pool.extend(buffers[over], value)
    begins = [0]
    for size in pool.sizes:
        begins.append(begins[-1] + size)
    offsets = tuple(begins[b] for b in buffers)
    return Allocation(strategy, schedule, values, tuple(buffers), tuple(pool.sizes), offsets, begins[-1])


def _overwritten(value: Value, values: tuple[Value, ...], buffers: list[int], pool: _Pool) -> int | None:
    """The operand that the value is written over: one that only this operation still reads (counter 1)."""
    for v in value.may_overwrite:
        fits = pool.sizes[buffers[v]] >= value.size_bytes
        if values[v].last == value.made and pool.last[buffers[v]] == value.made and fits:
            return v
    return None


class _Pool:
    """The buffers (temporal tags of Figure 2) and those among them that are free to be taken again."""

    def __init__(self, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        self.sizes: list[int] = []
        self.last: list[int] = []  # of each buffer: the last tick at which its present value must exist
        self.busy: list[tuple[int, int]] = []  # last tick and buffer, soonest first; outdated entries are skipped
        self.free: set[int] = set()

    def take(self, value: Value) -> int:
        """A buffer for a value that is made now: the tightest free one, else the largest one grown, else a new one."""
        while self.busy and self.busy[0][0] < value.made:
            last, buffer = heapq.heappop(self.busy)
            if last == self.last[buffer]:
                self.free.add(buffer)
        if self.is_shared and self.free:
            large = [b for b in self.free if self.sizes[b] >= value.size_bytes]
            buffer = (min if large else max)(large or self.free, key=lambda b: (self.sizes[b], b))
            self.free.discard(buffer)
            self.sizes[buffer] = max(self.sizes[buffer], value.size_bytes)
        else:
            buffer = len(self.sizes)
            self.sizes.append(value.size_bytes)
            self.last.append(value.last)
        self.extend(buffer, value)
        return buffer

    def extend(self, buffer: int, value: Value) -> None:
        """The buffer's next value is written over the present one."""
        self.last[buffer] = value.last
        heapq.heappush(self.busy, (value.last, buffer))
