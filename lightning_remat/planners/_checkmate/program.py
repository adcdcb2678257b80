"""The integer program of recomputation: which node runs in which step, and what stays resident between steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array  # pyright: ignore[reportMissingTypeStubs]

from ...schedules.graph import Graph
from ...schedules.uses import readers, storage_readers

Column = int
ZERO, ONE, PEAK = 0, 1, 2  # columns with the fixed values 0 and 1, and the most memory alive


@dataclass(frozen=True, slots=True)
class Program:
    """Minimize `seconds` (or the peak) over columns x with `low <= x <= high` and `A x <= b`.

    Attributes:
        seconds: Cost of each column: time of every run that is not the first, in thousandths of one forward pass.
        matrix: A, sparse.
        bounds: b.
        low: Lower bounds of the columns.
        high: Upper bounds of the columns; that of `PEAK` is the budget.
        is_integral: Which columns are decisions.
        outputs: For each step, the column of each node that says whether its output is resident at the end.
        tapes: Likewise for its tape.
        unit_bytes: What one unit of memory in the program stands for.
    """

    seconds: NDArray[np.float64]
    matrix: Any
    bounds: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    is_integral: NDArray[np.uint8]
    outputs: tuple[dict[int, Column], ...]
    tapes: tuple[dict[int, Column], ...]
    unit_bytes: float


def build_program(
    graph: Graph,
    *,
    is_forward_fixed: bool,
    stages: Sequence[range],
    levels: tuple[list[int], list[int]],
) -> Program:
    """The program of all schedules that run a node at most once in a step, in index order.

    Step t < n is the first run of node t; each later step takes the backwards of one stage, the last stage first. A
    step recomputes what it needs and then takes its action. With a stage for each node the memory rules are those of
    `simulate`: outputs, tapes, views, workspaces, outputs that the caller holds, and the levels of gradients, which
    are constants. Longer stages make a smaller program that overestimates: all that a stage needs is resident before
    its first backward.

    Args:
        graph: The operations.
        is_forward_fixed: Whether nothing is recomputed before the first backward; halves the program.
        stages: Consecutive nodes whose backwards make up one step.
        levels: Bytes of gradients before, and at most during, each backward.

    Reference: Jain et al. 2020 (Checkmate), section 4: R is `run`, S the resident columns; their FREE is replaced
    by the level of each output after each action that touches it, which gives the same integer points.
    """
    return _Builder(graph, is_forward_fixed, stages, levels).build()


@dataclass(slots=True)
class _Builder:
    graph: Graph
    is_forward_fixed: bool
    stages: Sequence[range]
    levels: tuple[list[int], list[int]]
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    low: list[float] = field(default_factory=lambda: [0.0, 1.0, 0.0])
    high: list[float] = field(default_factory=lambda: [0.0, 1.0, np.inf])
    is_integral: list[int] = field(default_factory=lambda: [0, 0, 0])
    bounds: list[float] = field(default_factory=list[float])
    entries: list[tuple[int, Column, float]] = field(default_factory=list[tuple[int, Column, float]])
    outputs: list[dict[int, Column]] = field(default_factory=list[dict[int, Column]])
    tapes: list[dict[int, Column]] = field(default_factory=list[dict[int, Column]])
    unit: float = 1.0
    scale: float = 1.0
    users: list[list[int]] = field(default_factory=list[list[int]])  # of each node: who reads or views it
    readers: list[list[int]] = field(default_factory=list[list[int]])  # of each root: who reads it or a view of it
    kept: dict[int, tuple[Column, Column]] = field(default_factory=dict[int, tuple[Column, Column]])
    memory: Column = ZERO  # level of outputs and tapes after the last action

    def column(self, seconds: float = 0.0, *, is_integral: bool = False, high: float = 1.0) -> Column:
        self.seconds.append(seconds)
        self.low.append(0.0)
        self.high.append(high)
        self.is_integral.append(int(is_integral))
        return len(self.low) - 1

    def row(self, terms: Iterable[tuple[Column, float]], bound: float = 0.0) -> None:
        """Σ coefficient · column <= bound."""
        kept: list[tuple[Column, float]] = []
        for column, coefficient in terms:
            if column == ONE:
                bound -= coefficient
            elif column != ZERO and coefficient:
                kept.append((column, coefficient))
        if kept:
            self.entries += [(len(self.bounds), column, coefficient) for column, coefficient in kept]
            self.bounds.append(bound)
        else:
            assert bound >= -1e-9, "the fixed part of the program contradicts itself"

    def build(self) -> Program:
        graph, count = self.graph, len(self.graph.nodes)
        before, highest = self.levels
        self.unit = _unit([*_sizes(graph), *before, *highest])
        total = sum(node.forward_seconds for node in graph.nodes) or 1.0
        self.scale = _SCALE / total
        self.users, self.readers = readers(graph), storage_readers(graph)
        fixed = graph.input_bytes + graph.static_bytes
        for step in range(count):
            self._step(range(step, step + 1), self._forward_columns(step), fixed, None)
        for stage in reversed(self.stages):
            most = fixed + max(highest[m] for m in stage)
            self._step(stage, self._backward_columns(stage), fixed + max(before[m] for m in stage), most)
        rows, columns, values = zip(*self.entries, strict=True)
        shape = (len(self.bounds), len(self.low))
        return Program(
            seconds=np.array(self.seconds),
            matrix=csr_array((np.array(values), (np.array(rows), np.array(columns))), shape=shape),
            bounds=np.array(self.bounds),
            low=np.array(self.low),
            high=np.array(self.high),
            is_integral=np.array(self.is_integral, np.uint8),
            outputs=tuple(self.outputs),
            tapes=tuple(self.tapes),
            unit_bytes=self.unit,
        )

    def _held(self, num_run: int, num_left: int) -> set[int]:
        """Roots whose storage the caller holds after some first runs, with some backwards to go: it is free to keep."""
        return {self.graph.roots[o] for o in self.graph.outputs if o < min(num_run, num_left)}

    def _forward_columns(self, step: int) -> dict[int, Column]:
        """Appends the resident columns at the end of a step of the forward; the columns of its runs."""
        graph, held = self.graph, self._held(step + 1, len(self.graph.nodes))
        taped = [i for i in range(step + 1) if graph.nodes[i].tape_bytes]
        if self.is_forward_fixed:
            # What a later node reads stays; then the one choice for the whole forward applies.
            self.kept[step] = self.column(is_integral=True), self.column(is_integral=True)
            read = [self.users[i] if graph.nodes[i].is_view else self.readers[i] for i in range(step + 1)]
            outputs = {i: ONE if max(k, default=i) > step else self.kept[i][0] for i, k in enumerate(read)}
            tapes = {i: self.kept[i][1] for i in taped}
            runs: dict[int, Column] = {}
        else:
            outputs = {i: self.column(is_integral=True) for i in range(step + 1)}
            tapes = {i: self.column(is_integral=True) for i in taped}
            runs = {i: self.column(self.scale * graph.nodes[i].forward_seconds, is_integral=True) for i in range(step)}
        self.outputs.append({i: ONE if i in held else column for i, column in outputs.items()})
        self.tapes.append(tapes)
        return {**runs, step: ONE}

    def _backward_columns(self, stage: range) -> dict[int, Column]:
        graph, held = self.graph, self._held(len(self.graph.nodes), stage.start)
        left = range(stage.start)
        self.outputs.append({i: ONE if i in held else self.column(is_integral=True) for i in left})
        self.tapes.append({i: self.column(is_integral=True) for i in left if graph.nodes[i].tape_bytes})
        return {
            i: self.column(self.scale * graph.nodes[i].forward_seconds, is_integral=True) for i in range(stage.stop)
        }

    def _step(self, stage: range, runs: dict[int, Column], fixed: int, most: int | None) -> None:
        """Rows of one step: residency, dependencies and the memory level before and after each action.

        Args:
            stage: The nodes whose forward or backwards end the step; their columns are the last ones appended.
            runs: Column of the run of each node, in index order.
            fixed: Bytes besides outputs and tapes during the runs.
            most: The same during the backwards; None in a step of the forward.
        """
        graph = self.graph
        needed: set[int] = set()
        if most is not None:
            saved = {i for m in stage for i in graph.nodes[m].saved}
            needed = saved | {graph.roots[i] for i in saved} | {graph.roots[m] for m in stage if m in graph.outputs}
        changes: dict[int, list[tuple[Column, float]]] = {}
        for i in range(stage.stop):
            if graph.nodes[i].is_view:
                self._view_rows(i, runs, needed)
            else:
                self._output_rows(i, runs, needed, changes)
        memory = self.memory
        for k, run in runs.items():
            node = graph.nodes[k]
            size = node.output_bytes + node.tape_bytes + node.forward_workspace_bytes
            self.row([(memory, 1), (run, size / self.unit), (PEAK, -1)], -fixed / self.unit)
            if node.tape_bytes:
                self._tape_rows(k, run, changes, ONE if most is not None and k in stage else None)
            memory = self._changed(memory, changes.get(k, []))
        if most is not None:
            self.row([(memory, 1), (PEAK, -1)], -most / self.unit)
            tape_bytes = sum(graph.nodes[m].tape_bytes for m in stage)
            if tape_bytes:
                changes.setdefault(-1, []).append((ONE, -tape_bytes / self.unit))
            memory = self._changed(memory, changes.get(-1, []))
        self.memory = memory

    def _changed(self, memory: Column, changes: list[tuple[Column, float]]) -> Column:
        """The memory level after an action, at least that before it with the changes."""
        if not changes:
            return memory
        after = self.column(high=np.inf)
        self.row([(memory, 1), *changes, (after, -1)])
        return after

    def _view_rows(self, i: int, runs: dict[int, Column], needed: set[int]) -> None:
        graph, before = self.graph, self.outputs[-2] if len(self.outputs) > 1 else {}
        made = [(before.get(i, ZERO), -1.0), (runs.get(i, ZERO), -1.0)]
        for k in self.users[i]:
            if k in runs:
                self.row([(runs[k], 1), *made])
        if i in needed:
            self.row([(ONE, 1), *made])
        end = self.outputs[-1].get(i, ZERO)
        self.row([(end, 1), *made])
        self.row([(end, 1), (self.outputs[-1].get(graph.roots[i], ZERO), -1)])  # a view keeps its storage alive

    def _output_rows(
        self,
        i: int,
        runs: dict[int, Column],
        needed: set[int],
        changes: dict[int, list[tuple[Column, float]]],
    ) -> None:
        """The level of one storage through the actions of a step that touch it: its own run, its readers', -1 for B."""
        size = self.graph.nodes[i].output_bytes / self.unit
        events = [k for k in (i, *self.readers[i]) if k in runs] + ([-1] if i in needed else [])
        level = self.outputs[-2].get(i, ZERO) if len(self.outputs) > 1 else ZERO
        end = self.outputs[-1].get(i, ZERO)
        for k in events:
            after = end if k == events[-1] else self.column()
            if k == i:
                self.row([(after, 1), (level, -1), (runs[i], -1)])
            else:
                self.row([(ONE if k < 0 else runs[k], 1), (level, -1)])
                self.row([(after, 1), (level, -1)])
            if size and after != level:
                changes.setdefault(k, []).extend([(after, size), (level, -size)])
            level = after

    def _tape_rows(
        self, k: int, run: Column, changes: dict[int, list[tuple[Column, float]]], after: Column | None
    ) -> None:
        """A tape stays from some run of its node to its backward, so that it is never dropped in between."""
        size = self.graph.nodes[k].tape_bytes / self.unit
        before = self.tapes[-2].get(k, ZERO) if len(self.tapes) > 1 else ZERO
        after = self.tapes[-1][k] if after is None else after
        self.row([(after, 1), (before, -1), (run, -1)])
        self.row([(before, 1), (after, -1)])
        if after != before:
            changes.setdefault(k, []).extend([(after, size), (before, -size)])


_SCALE = 1000.0


def _unit(sizes: Sequence[int]) -> float:
    """A unit in which all sizes are exact and the largest is about 100: solvers are slow on numbers of bytes."""
    unit = max(1, math.gcd(*sizes))
    while max(sizes) > 128 * unit:
        unit *= 2
    return float(unit)


def _sizes(graph: Graph) -> Iterable[int]:
    for node in graph.nodes:
        yield from (node.output_bytes, node.tape_bytes, node.forward_workspace_bytes)
    yield graph.input_bytes + graph.static_bytes
