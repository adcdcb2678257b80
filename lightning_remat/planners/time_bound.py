"""A lower bound on recomputation at a budget, and what its optimum keeps: a linear program over the backwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, sparse  # pyright: ignore[reportMissingTypeStubs]

from ..graph import Graph
from ..lowering import reads
from .fast_simulator import Floats
from .gradient_levels import gradient_levels

MAX_COLUMNS = 12_000


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The fractional optimum.

    Attributes:
        seconds: Recomputation that no schedule within the budget avoids; infinite where none fits.
        outputs: [n] how much of each output is alive at the first of the steps that are too full; 1 where the
            program does not ask.
        tapes: [n] the same of tapes.
    """

    seconds: float
    outputs: Floats
    tapes: Floats


def least_recompute_seconds(graph: Graph, budget_bytes: int) -> float:
    """Seconds of recomputation that no schedule within the budget avoids.

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.

    Returns:
        A lower bound; infinite where the program has no solution, so that no schedule fits.
    """
    return relax(graph, budget_bytes).seconds


def relax(graph: Graph, budget_bytes: int) -> Relaxation:
    """The least recomputation, fractionally.

    At the backward of a node, each value that later backwards need is alive, or its node runs again afterwards; and
    what that run reads is alive then, or runs again in turn. The linear program chooses this, fractionally and at
    several of the fullest steps at once, so that their memory fits. The true optimum may lie above.

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.
    """
    count = len(graph.nodes)
    steps = _fullest_steps(graph, budget_bytes)
    outputs, tapes = np.ones(count), np.ones(count)
    if not steps:
        return Relaxation(0.0, outputs, tapes)
    program = _Rows(count * (1 + 3 * len(steps)))
    for k, (n, room) in enumerate(steps):
        _add_step(program, graph, n, room / max(1, budget_bytes), count * (1 + 3 * k), max(1, budget_bytes))
    cost = np.zeros(program.num_columns)
    cost[:count] = [node.forward_seconds for node in graph.nodes]
    found: Any = optimize.linprog(cost, program.matrix(), np.array(program.limits), bounds=(0, 1), method="highs")  # pyright: ignore[reportUnknownMemberType]
    if found.status:
        return Relaxation(float("inf"), outputs, tapes)
    last = steps[0][0]  # what stands behind is gone by then
    there = {graph.roots[i] for i in graph.nodes[last].saved}
    asked = [v for v in range(last) if v not in there]
    outputs[asked] = found.x[count : 2 * count][asked]
    tapes[:last] = found.x[3 * count : 3 * count + last]
    return Relaxation(float(found.fun), outputs, tapes)


class _Rows:
    """Constraints of the form `sum of coefficient * column <= limit`."""

    def __init__(self, num_columns: int) -> None:
        self.num_columns = num_columns
        self.limits: list[float] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []

    def add(self, terms: list[tuple[int, float]], limit: float) -> None:
        for column, value in terms:
            self._rows.append(len(self.limits))
            self._columns.append(column)
            self._values.append(value)
        self.limits.append(limit)

    def matrix(self) -> Any:
        shape = (len(self.limits), self.num_columns)
        return sparse.csr_array((self._values, (self._rows, self._columns)), shape=shape)


def _fullest_steps(graph: Graph, budget_bytes: int) -> list[tuple[int, int]]:
    """Nodes whose backward plain autograd cannot fit, spread over all such, with the room left for other values."""
    readers, held = _first_readers(graph), {graph.roots[n] for n in graph.outputs}
    _, highest = gradient_levels(graph)
    over: list[tuple[int, int]] = []
    for n, node in enumerate(graph.nodes):
        now = {graph.roots[i] for i in node.saved}
        fixed = graph.input_bytes + graph.static_bytes + highest[n] + node.tape_bytes
        room = budget_bytes - fixed - sum(graph.nodes[r].output_bytes for r in now)
        later = sum(m.output_bytes for v, m in enumerate(graph.nodes) if readers[v] < n and v not in now | held)
        if later + sum(m.tape_bytes for m in graph.nodes[:n]) > room:
            over.append((n, room))
    most = max(1, min(8, MAX_COLUMNS // (3 * len(graph.nodes) + 1)))
    over.reverse()  # the backward starts at the last node: the first steps are the fullest
    if len(over) <= most:
        return over
    return [over[k * (len(over) - 1) // max(1, most - 1)] for k in range(most)]


def _add_step(program: _Rows, graph: Graph, n: int, room: float, first: int, scale: int) -> None:
    """Constraints of the backward of node n: columns `first` on are alive, run again, tape alive, for each node."""
    count = len(graph.nodes)
    alive, again, tape = first, first + count, first + 2 * count
    readers, held = _first_readers(graph), {graph.roots[m] for m in graph.outputs}
    there = held | {graph.roots[i] for i in graph.nodes[n].saved}
    memory: list[tuple[int, float]] = []
    for v, node in enumerate(graph.nodes[: n + 1]):
        if node.is_view:
            continue
        program.add([(again + v, 1.0), (v, -1.0)], 0.0)
        if v not in there:
            memory.append((alive + v, node.output_bytes / scale))
            if readers[v] < n:
                program.add([(alive + v, -1.0), (again + v, -1.0)], -1.0)
        if node.tape_bytes and v < n:
            memory.append((tape + v, node.tape_bytes / scale))
            program.add([(tape + v, -1.0), (again + v, -1.0)], -1.0)
        for i in {graph.roots[i] for i in reads(graph, v)} - there:
            program.add([(again + v, 1.0), (alive + i, -1.0), (again + i, -1.0)], 0.0)
    program.add(memory, room)


def _first_readers(graph: Graph) -> list[int]:
    """For each root the lowest node whose backward reads its output, the last to do so; the count where none does."""
    count = len(graph.nodes)
    readers = [count] * count
    for n in range(count):
        for i in graph.nodes[n].saved:
            readers[graph.roots[i]] = min(readers[graph.roots[i]], n)
    return readers
