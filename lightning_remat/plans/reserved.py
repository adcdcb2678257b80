"""What a device's caching allocator reserves for a step by its plan: rounding, segments, fragmentation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ..schedules.simulator import Replay
from .caching_allocator import Block, CachingAllocator, LimitExceededError
from .plan import StepPlan

_STEPS = 2
"""After the first one gradients are alive in the forward, and memory is in pieces."""

_PRECISION_BYTES = 1 << 18
"""Segments are that coarse."""


@dataclass(frozen=True)
class Reservation:
    """The memory of a planned step on a device whose allocator keeps what was freed.

    A node's output, its tape and what it needs meanwhile are taken as a block each.

    Attributes:
        graph: The operations.
        schedule: The step.
        held: Bytes of the tensors that stay (parameters, buffers, optimizer state), in the order in which they were
            made; the rest of what stays is taken as one block.
        extra_bytes: What stays beside what the graph tells.
    """

    graph: Graph
    schedule: Schedule
    held: tuple[int, ...] = ()
    extra_bytes: int = 0

    @classmethod
    def of(cls, step: StepPlan, held: tuple[int, ...] = ()) -> Reservation:
        """That of a training step."""
        whole = step.as_plan("")
        return cls(whole.graph, whole.schedule, held, max(0, step.surroundings.correction_bytes))

    def within(self, limit_bytes: int | None = None) -> CachingAllocator:
        """The allocator after the step's allocations in their order.

        Raises:
            LimitExceededError: They do not get by with that many bytes.
        """
        graph, schedule = self.graph, self.schedule
        memory = CachingAllocator(limit_bytes)
        for size in self.held:
            memory.allocate(size)
        staying = graph.static_bytes + graph.input_bytes + self.extra_bytes
        memory.allocate(max(0, staying - sum(self.held)))
        gradients: _Blocks = []
        for _ in range(_STEPS):
            replay = _Allocations(graph, schedule, memory, gradients)
            replay.run()
            for block in replay.staying:
                memory.free(block)
            gradients = replay.gradients
        return memory

    @cached_property
    def needed_bytes(self) -> int:
        """The least with which the step gets by: an allocator hands back what it has unused before it fails."""
        unlimited = self.within()
        low, high = unlimited.most_allocated_bytes, unlimited.most_reserved_bytes
        while high - low > _PRECISION_BYTES:
            middle = (low + high) // 2
            try:
                self.within(middle)
                high = middle
            except LimitExceededError:
                low = middle
        return high


_Blocks = list[Block | None]


class _Allocations(Replay):
    """Replays a schedule with blocks for what it counts."""

    def __init__(self, graph: Graph, schedule: Schedule, memory: CachingAllocator, earlier: _Blocks) -> None:
        super().__init__(graph, schedule, "fresh")
        self.memory, self.earlier = memory, earlier
        self.blocks: dict[int, Block | None] = {}
        self.tapes: dict[int, _Blocks] = {}
        self.gradients: _Blocks = []
        self.staying: _Blocks = []

    def allocate(self, size: int) -> int:
        storage = super().allocate(size)
        self.blocks[storage] = self.memory.allocate(size)
        return storage

    def release(self, storage: int) -> None:
        super().release(storage)
        if not self.holders[storage]:
            self.memory.free(self.blocks.pop(storage))

    def pieces(self, n: int, size: int) -> _Blocks:
        """Blocks for what node n takes beside its output: none is larger than what it reads and makes."""
        graph = self.graph
        largest = max(graph.nodes[graph.roots[i]].output_bytes for i in (n, *graph.nodes[n].inputs))
        count, rest = divmod(size, largest) if largest else (0, size)
        return [self.memory.allocate(size) for size in (*[largest] * count, rest)]

    def free(self, blocks: _Blocks) -> None:
        """They are unused from here on."""
        for block in blocks:
            self.memory.free(block)

    def begin_backward(self) -> int:
        self.free(self.earlier)
        return super().begin_backward()

    def forward(self, position: int, n: int) -> int:
        node, had_output, had_tape = self.graph.nodes[n], self.output[n] is not None, self.tape[n]
        meanwhile = self.pieces(n, node.forward_workspace_bytes)
        if had_output:
            meanwhile.append(self.memory.allocate(node.output_bytes))
        most = super().forward(position, n)
        tape = self.pieces(n, node.tape_bytes)
        if had_tape:
            meanwhile += tape
        else:
            self.tapes[n] = tape
        self.free(meanwhile)
        return most

    def discard_tape(self, position: int, n: int) -> int:
        self.free(self.tapes.pop(n))
        return super().discard_tape(position, n)

    def propagate(self, n: int, *, is_released: bool) -> int:
        if not self.gradient[n]:
            return self.alive
        node = self.graph.nodes[n]
        self.gradients.append(self.memory.allocate(node.parameter_bytes))
        self.staying.append(self.memory.allocate(node.input_gradient_bytes))
        workspace = self.pieces(n, node.backward_workspace_bytes)
        most = super().propagate(n, is_released=is_released)
        self.free(workspace)
        return most
