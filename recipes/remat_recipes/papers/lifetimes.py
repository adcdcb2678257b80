"""When each value of a step is made and read: the ground that static memory allocation stands on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from lightning_remat import Graph, Schedule
from lightning_remat.schedules.gradients import GradientMemory
from lightning_remat.schedules.kinds import ELEMENTWISE, consists_of


@dataclass(frozen=True, slots=True)
class Value:
    """One result of one run of an operation.

    Ticks count the operations of the step: forward runs, backwards, and the additions of gradients.

    Attributes:
        node: Index of the node that it belongs to.
        kind: What it is to the node: its output, its tape or the gradient of its output.
        size_bytes: Its size.
        made: The tick of the operation that writes it.
        uses: The ticks of the operations that read it, in order.
        may_overwrite: Positions of the values that the operation reads and may write this one over.
    """

    node: int
    kind: Literal["output", "tape", "gradient"]
    size_bytes: int
    made: int
    uses: tuple[int, ...]
    may_overwrite: tuple[int, ...]

    @property
    def last(self) -> int:
        """The last tick at which it must exist."""
        return self.uses[-1] if self.uses else self.made


def lifetimes(graph: Graph, schedule: Schedule) -> tuple[Value, ...]:
    """The values that a valid schedule makes, in the order in which it makes them.

    Parameters, their gradients, workspaces and the graph's inputs are not among them: the paper counts feature maps
    and their gradients. A view is its storage, and a gradient that an operation passes on is the one it got.

    Reference: Chen et al. 2016, section 3.
    """
    replay = _Replay(graph)
    for kind, n in schedule:
        if kind == "F":
            replay.forward(n)
        elif kind == "B":
            replay.backward(n)
        elif kind == "D":
            replay.output.pop(n)
        else:
            replay.tape.pop(n)
    return tuple(replace(v, uses=tuple(sorted(uses))) for v, uses in zip(replay.values, replay.uses, strict=True))


class _Replay(GradientMemory):
    """Numbers values as storages are numbered, and notes when each is made and used; bytes alive are not asked for."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.tick = -1
        self.values: list[Value] = []  # but for their uses
        self.uses: list[set[int]] = []
        self.output: dict[int, int] = {}  # node -> the value that its resident output lives in
        self.tape: dict[int, int] = {}
        self.held: dict[int, int] = {}  # what the caller holds until the backward
        self.has_run: set[int] = set()
        self.is_backward = False
        self.overwritable: list[int] = []  # by the gradients that are made next

    def make(self, n: int, kind: Literal["output", "tape", "gradient"], size: int, over: Iterable[int] = ()) -> int:
        self.values.append(Value(n, kind, size, self.tick, (), tuple(dict.fromkeys(over))))
        self.uses.append(set())
        return self.allocate(size)

    def use(self, values: Iterable[int]) -> None:
        for v in values:
            self.uses[v].add(self.tick)

    def forward(self, n: int) -> None:
        graph, node = self.graph, self.graph.nodes[n]
        self.tick += 1
        operands = [self.output[i] for i in graph.reads[n]]
        self.use(operands)
        if node.storage_of is not None:
            self.output.setdefault(n, self.output[node.storage_of])
        else:
            # A run makes its output even where only the tape is wanted; the second copy dies at once.
            made = self.make(n, "output", node.output_bytes, operands if consists_of(node, ELEMENTWISE) else ())
            self.output.setdefault(n, made)
        if node.tape_bytes:
            made = self.make(n, "tape", node.tape_bytes)
            self.tape.setdefault(n, made)
        if n in graph.outputs and n not in self.has_run:
            self.held[n] = self.output[n]
        self.has_run.add(n)

    def backward(self, n: int) -> None:
        graph, node = self.graph, self.graph.nodes[n]
        self.tick += 1
        if not self.is_backward:
            self.is_backward = True
            self.begin_backward()
            self.tick += 1
        self.use([self.output[i] for i in node.saved])
        if node.tape_bytes:
            self.use([self.tape[n]])
        if n in self.held:
            self.use([self.held.pop(n)])
        self.use(self.gradient[n])
        made = set(self.receivers(n)).difference(graph.shares_gradient(n))
        is_single = len(made) == 1  # two results would need the gradient twice
        self.overwritable = self.gradient[n] if is_single and consists_of(node, ELEMENTWISE) else []
        self.propagate(n, is_released=True)

    def new_gradient(self, n: int) -> int:
        return self.make(n, "gradient", self.graph.gradient_bytes(n), self.overwritable)

    def add(self, i: int, storage: int) -> int:
        """A second contribution is added to the first one, an operation of its own."""
        held = self.gradient[i]
        self.tick += 1
        self.overwritable = [held[0], storage]
        self.use(self.overwritable)
        held[0] = self.new_gradient(i)
        return self.alive
