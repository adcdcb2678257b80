"""A lower bound on recomputation at a budget, and what its optimum keeps: a linear program over the backwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, sparse  # pyright: ignore[reportMissingTypeStubs]

from .arrays import graph_arrays
from .compiled import Floats, Ints
from .gradients import gradient_levels
from .graph import Graph

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
    return TimeBound(graph).relax(budget_bytes).seconds


class TimeBound:
    """The least recomputation of one graph, fractionally, for any budget.

    At the backward of a node, each value that later backwards need is alive, or its node runs again afterwards; and
    what that run reads is alive then, or runs again in turn. The linear program chooses this, fractionally and at
    several of the fullest steps at once, so that their memory fits. The true optimum may lie above.

    Args:
        graph: The operations.
        max_columns: Of the linear program: more let it look at more steps at once, for a higher bound.
    """

    def __init__(self, graph: Graph, max_columns: int = MAX_COLUMNS) -> None:
        self.graph, self._max_columns = graph, max_columns
        arrays = graph_arrays(graph)
        count = len(graph.nodes)
        self._output_bytes, self._tape_bytes, self._seconds = arrays.output_bytes, arrays.tape_bytes, arrays.seconds
        self._is_view = arrays.base >= 0
        self._readers = _first_readers(graph)
        pairs = {(v, graph.roots[i]) for v in range(count) if not self._is_view[v] for i in graph.reads[v]}
        self._reads: Ints = np.array(sorted(pairs), np.int64).reshape(-1, 2)  # node, root that its run reads
        self._saved = [{graph.roots[i] for i in node.saved} for node in graph.nodes]
        self._held = {graph.roots[n] for n in graph.outputs}
        _, highest = gradient_levels(graph)
        fixed = graph.input_bytes + graph.static_bytes
        now = [sum(graph.nodes[r].output_bytes for r in roots) for roots in self._saved]
        self._own_bytes: Ints = fixed + np.array(highest, np.int64) + np.array(now, np.int64) + self._tape_bytes
        tapes_before: Ints = np.cumsum(self._tape_bytes) - self._tape_bytes
        self._others_bytes: Ints = tapes_before + [self._later_bytes(n) for n in range(count)]

    def relax(self, budget_bytes: int) -> Relaxation:
        """The optimum at a true peak of `budget_bytes`."""
        count = len(self.graph.nodes)
        steps = self._fullest_steps(budget_bytes)
        outputs, tapes = np.ones(count), np.ones(count)
        if not steps:
            return Relaxation(0.0, outputs, tapes)
        program = _Rows(count * (1 + 3 * len(steps)))
        scale = max(1, budget_bytes)
        for k, n in enumerate(steps):
            self._add_step(program, n, budget_bytes - int(self._own_bytes[n]), count * (1 + 3 * k), scale)
        cost = np.zeros(program.num_columns)
        cost[:count] = self._seconds
        matrix, limits = program.joined()
        found: Any = optimize.linprog(cost, matrix, limits, bounds=(0, 1), method="highs")  # pyright: ignore[reportUnknownMemberType]
        if found.status:
            return Relaxation(float("inf"), outputs, tapes)
        last = steps[0]  # what stands behind is gone by then
        asked = [v for v in range(last) if v not in self._saved[last]]
        outputs[asked] = found.x[count : 2 * count][asked]
        tapes[:last] = found.x[3 * count : 3 * count + last]
        return Relaxation(float(found.fun), outputs, tapes)

    def _later_bytes(self, n: int) -> int:
        """Outputs that backwards after that of n read, but for those that it reads itself or the caller holds."""
        is_later = self._readers < n
        is_later[list(self._saved[n] | self._held)] = False
        return int(self._output_bytes[is_later].sum())

    def _fullest_steps(self, budget_bytes: int) -> list[int]:
        """Nodes whose backward plain autograd cannot fit, the first to run first, spread over all such."""
        # The backward starts at the last node: the first steps are the fullest.
        over: list[int] = np.flatnonzero(self._own_bytes + self._others_bytes > budget_bytes)[::-1].tolist()
        most = max(1, min(8, self._max_columns // (3 * len(self.graph.nodes) + 1)))
        if len(over) <= most:
            return over
        return [over[k * (len(over) - 1) // max(1, most - 1)] for k in range(most)]

    def _add_step(self, program: _Rows, n: int, room_bytes: int, first: int, scale: int) -> None:
        """Constraints of the backward of node n: columns `first` on are alive, run again, tape alive, of each node."""
        count = len(self.graph.nodes)
        alive, again, tape = first, first + count, first + 2 * count
        is_there = np.zeros(count, np.bool_)
        is_there[list(self._saved[n] | self._held)] = True
        nodes: Ints = np.arange(n + 1)[~self._is_view[: n + 1]]
        program.add((again + nodes, 1.0), (nodes, -1.0), limit=0.0)
        absent = nodes[~is_there[nodes]]
        needed = absent[self._readers[absent] < n]
        program.add((alive + needed, -1.0), (again + needed, -1.0), limit=-1.0)
        taped = nodes[(self._tape_bytes[nodes] > 0) & (nodes < n)]
        program.add((tape + taped, -1.0), (again + taped, -1.0), limit=-1.0)
        node, read = self._reads[(self._reads[:, 0] <= n) & ~is_there[self._reads[:, 1]]].T
        program.add((again + node, 1.0), (alive + read, -1.0), (again + read, -1.0), limit=0.0)
        columns = np.concatenate([alive + absent, tape + taped])
        sizes = np.concatenate([self._output_bytes[absent], self._tape_bytes[taped]])
        program.add_one(columns, sizes / scale, limit=room_bytes / scale)


class _Rows:
    """Constraints of the form `sum of coefficient * column <= limit`."""

    def __init__(self, num_columns: int) -> None:
        self.num_columns = num_columns
        self._num_rows = 0
        self._limits: list[Floats] = []
        self._rows: list[Ints] = []
        self._columns: list[Ints] = []
        self._values: list[Floats] = []

    def add(self, *terms: tuple[Ints, float], limit: float) -> None:
        """A constraint for each column of the terms, which are equally many; a term is columns and a coefficient."""
        num_rows = len(terms[0][0])
        for columns, value in terms:
            self._rows.append(self._num_rows + np.arange(num_rows))
            self._columns.append(columns)
            self._values.append(np.full(num_rows, value))
        self._limits.append(np.full(num_rows, limit))
        self._num_rows += num_rows

    def add_one(self, columns: Ints, values: Floats, *, limit: float) -> None:
        """One constraint."""
        self._rows.append(np.full(len(columns), self._num_rows))
        self._columns.append(columns)
        self._values.append(values)
        self._limits.append(np.array([limit]))
        self._num_rows += 1

    def joined(self) -> tuple[Any, Floats]:
        """All of them as a matrix and a vector."""
        values, rows, columns = (np.concatenate(x) for x in (self._values, self._rows, self._columns))
        matrix: Any = sparse.csr_array((values, (rows, columns)), shape=(self._num_rows, self.num_columns))
        return matrix, np.concatenate(self._limits)


def _first_readers(graph: Graph) -> Ints:
    """For each root the lowest node whose backward reads its output, the last to do so; the count where none does."""
    readers: Ints = np.full(len(graph.nodes), len(graph.nodes), np.int64)
    for n, node in enumerate(graph.nodes):
        for i in node.saved:
            readers[graph.roots[i]] = min(readers[graph.roots[i]], n)
    return readers
