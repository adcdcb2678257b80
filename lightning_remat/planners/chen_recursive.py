"""Recursion over segments: k values kept at each level, and memory that grows with the logarithm of the depth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from ..compiled import Small
from ..graph import Graph
from ..graph_arrays import BACKWARD, DISCARD, DISCARD_TAPE, RUN
from ..lowering import missing, with_liveness
from ..schedule import Schedule
from .family import Candidate, fastest_that_fits, trade_off
from .storage_graph import articulation_points, merge_views

_NUM_KEPT = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def plan_chen_recursive(
    graph: Graph, budget_bytes: int, *, num_kept: int | None = None, num_levels: int | None = None
) -> Schedule:
    """The fastest recursive plan that fits: segments are split again, and recomputed again, inside their backward.

    At each level a range of the graph is cut into k + 1 segments of about equal memory; only what crosses the cuts
    is kept while the range runs forward, and each segment is then treated alike, from the last to the first. At full
    depth and k = 1 a chain of n equal operations needs memory O(log n) and O(n log n) forward runs. The candidates
    depend on the graph alone, so that more budget never makes the answer slower.

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.
        num_kept: Cuts of a level (k of the paper); None tries 1 to 32.
        num_levels: Levels of the recursion; None tries every number to the full depth.

    Returns:
        A schedule whose simulated peak is within the budget.

    Raises:
        InfeasibleBudgetError: None of these plans fits.
        ValueError: `num_kept` or `num_levels` is less than 1.

    Reference: Chen et al. 2016, section 4.4, equations (2) and (3): g(n) = k + g(n / (k + 1)) = k·log_{k+1} n.
    """
    for label, value in (("num_kept", num_kept), ("num_levels", num_levels)):
        if value is not None and value < 1:
            raise ValueError(f"{label} is {value}, expected at least 1")
    return fastest_that_fits(graph, budget_bytes, _family(graph, num_kept, num_levels), planner="chen_recursive")


@lru_cache(maxsize=8)
def _family(graph: Graph, num_kept: int | None, num_levels: int | None) -> tuple[Candidate, ...]:
    return trade_off(graph, _plans(graph, num_kept, num_levels))


def _plans(graph: Graph, num_kept: int | None, num_levels: int | None) -> Iterator[Schedule]:
    count = len(graph.nodes)
    cuts = _Cuts(graph)
    if num_levels is None:
        yield with_liveness(graph, _Recursion(graph, cuts, 1).actions(0))
    for k in _NUM_KEPT if num_kept is None else (num_kept,):
        if num_kept is None and k > max(1, count):
            break
        previous = np.empty(0, np.int32)
        for levels in range(1, count + 2) if num_levels is None else (num_levels,):
            actions = _Recursion(graph, cuts, k).actions(levels)
            if np.array_equal(actions, previous):
                break  # no segment is left to split
            yield with_liveness(graph, actions)
            previous = actions


class _Cuts:
    """Where a range of nodes may be cut: after articulation points if it holds any, else anywhere."""

    def __init__(self, graph: Graph) -> None:
        storages = merge_views(graph)
        points = {storages.owners[v] for v in articulation_points(len(storages.owners), storages.edges)}
        self.after_points = np.array(sorted(n + 1 for n in points), np.int64)
        left = [node.output_bytes + node.tape_bytes for node in graph.nodes]
        self.held = np.cumsum([0, *left])  # bytes that the nodes before each position leave when they run

    def split(self, start: int, stop: int, num_cuts: int) -> list[int]:
        """Positions strictly between `start` and `stop`, at about equal memory; fewer where there are not as many."""
        low, high = np.searchsorted(self.after_points, (start + 1, stop))
        allowed: Any = self.after_points[low:high] if low < high else np.arange(start + 1, stop)
        held: Any = self.held[allowed].astype(np.float64)
        chosen: list[int] = []
        for cut in range(1, min(num_cuts, len(allowed)) + 1):
            target = self.held[start] + (self.held[stop] - self.held[start]) * cut / (num_cuts + 1)
            nearest = int(np.abs(held - target).argmin())
            chosen.append(int(allowed[nearest]))
            held[nearest] = np.inf
        return sorted(chosen)


class _Recursion:
    """What is resident, while the actions of nested ranges are written down."""

    def __init__(self, graph: Graph, cuts: _Cuts, num_kept: int) -> None:
        self.graph, self.cuts, self.num_kept = graph, cuts, num_kept
        self.outputs: set[int] = set()
        self.tapes: set[int] = set()
        self.has_run = 0  # the nodes before have had their first run
        self.written: list[int] = []

    def actions(self, num_levels: int) -> Small:
        """Those of the whole step, as numbers."""
        self.train(0, len(self.graph.nodes), num_levels, frozenset())
        return np.array(self.written, np.int32)

    def train(self, start: int, stop: int, num_levels: int, kept: frozenset[int]) -> None:
        """Forward (what is not resident) and backward of the range; then only `kept` is resident of all outputs."""
        splits = self.cuts.split(start, stop, self.num_kept) if num_levels else []
        if not splits:
            self._train_at_once(start, stop)
        else:
            bounds = [start, *splits, stop]
            held = [kept]  # what is to stay while the segment behind each bound is trained
            for before, after in pairwise(bounds[:-1]):
                held.append(held[-1] | self._crossing(after, stop))
                self._advance(before, after, held[-1])
            for number in reversed(range(len(bounds) - 1)):
                self.train(bounds[number], bounds[number + 1], num_levels - 1, held[number])
        self._discard(kept)

    def _crossing(self, position: int, stop: int) -> frozenset[int]:
        """The nodes before `position` that a run or a backward of the nodes from there to `stop` reads."""
        nodes = self.graph.nodes
        used = {i for n in range(position, stop) for i in (*self.graph.reads[n], *nodes[n].saved)}
        return frozenset(i for i in used if i < position)

    def _advance(self, start: int, stop: int, kept: frozenset[int]) -> None:
        """Runs what makes `kept` resident, all of the range if it is its first time; keeps nothing else."""
        if self.has_run < stop:
            self._run(range(start, stop))
            self.has_run = stop
        else:
            self._run(self._makers(kept))
        self._discard(kept)

    def _makers(self, wanted: Iterable[int]) -> list[int]:
        """The nodes to run for the outputs of `wanted`, in order."""
        needed: set[int] = set()
        stack = [n for n in wanted if n not in self.outputs]
        while stack:
            n = stack.pop()
            if n not in needed:
                needed.add(n)
                stack += [i for i in self.graph.reads[n] if i not in self.outputs]
        return sorted(needed)

    def _train_at_once(self, start: int, stop: int) -> None:
        if self.has_run < stop:
            self._run(range(max(start, self.has_run), stop))
            self.has_run = stop
        for n in reversed(range(start, stop)):
            self._run(missing(self.graph, n, self.outputs, self.tapes))
            self.written.append(4 * n + BACKWARD)

    def _run(self, nodes: Iterable[int]) -> None:
        for n in nodes:
            self.written.append(4 * n + RUN)
            self.outputs.add(n)
            if self.graph.nodes[n].tape_bytes:
                self.tapes.add(n)

    def _discard(self, kept: frozenset[int]) -> None:
        self.written += [4 * n + DISCARD for n in sorted(self.outputs - kept)]
        self.outputs &= kept
        self.written += [4 * n + DISCARD_TAPE for n in sorted(self.tapes)]
        self.tapes.clear()
