"""Recursion over segments: k values kept at each level, and memory that grows with the logarithm of the depth."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..lowering import with_liveness
from ..schedules.arrays import BACKWARD, DISCARD, DISCARD_TAPE, RUN, GraphArrays, graph_arrays
from ..schedules.compiled import Flags, Ints, Small, njit
from ..schedules.edges import articulation_points
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ..schedules.storages import merge_views
from ..schedules.uses import mark_missing, mark_needed
from ._candidates import Candidate, fastest_that_fits, trade_off

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
    arrays, cuts = graph_arrays(graph), _cuts(graph)
    if num_levels is None:
        yield with_liveness(graph, _recursion(arrays, cuts, 1, 0))
    for k in _NUM_KEPT if num_kept is None else (num_kept,):
        if num_kept is None and k > max(1, count):
            break
        previous: Small | None = None
        for levels in range(1, count + 2) if num_levels is None else (num_levels,):
            actions = _recursion(arrays, cuts, k, levels)
            if previous is not None and np.array_equal(actions, previous):
                break  # no segment is left to split
            yield with_liveness(graph, actions)
            previous = actions


class _Cuts(NamedTuple):
    """Where a range of nodes may be cut: after articulation points if it holds any, else anywhere."""

    after_points: Ints
    held: Ints  # [n + 1] bytes that the nodes before each position leave when they run


def _cuts(graph: Graph) -> _Cuts:
    storages = merge_views(graph)
    points = {storages.owners[v] for v in articulation_points(len(storages.owners), storages.edges)}
    left = [node.output_bytes + node.tape_bytes for node in graph.nodes]
    return _Cuts(np.array(sorted(n + 1 for n in points), np.int64), np.cumsum([0, *left]))


class _Memory(NamedTuple):
    """What is resident, while the actions of nested ranges are written down."""

    outputs: Flags
    tapes: Flags
    is_needed: Flags  # scratch, empty between uses
    sizes: Ints  # actions written; nodes before this one have had their first run


@njit
def _recursion(arrays: GraphArrays, cuts: _Cuts, num_kept: int, num_levels: int) -> Small:
    """The actions of the whole step: ranges are trained last segment first, each segment as a range of its own.

    A task is a range to train, or what remains to do after its segments: then only what `kept` marks stays resident.
    """
    count = len(arrays.root)
    memory = _Memory(
        np.zeros(count, np.uint8), np.zeros(count, np.uint8), np.zeros(count, np.uint8), np.zeros(2, np.int64)
    )
    codes = np.empty(16 * count + 64, np.int32)
    kept = np.zeros((16, count), np.uint8)  # rows of a stack
    num_rows = 1
    tasks = [(0, count, num_levels, 0, False)]  # start, stop, levels, row of what is kept, whether only to clean up
    while len(tasks) > 0:
        start, stop, levels, row, is_done = tasks.pop()
        if memory.sizes[0] + 8 * count > len(codes):
            codes = np.concatenate((codes, np.empty_like(codes)))
        splits = _split(cuts, start, stop, num_kept) if levels and not is_done else np.empty(0, np.int64)
        if is_done or len(splits) == 0:
            if not is_done:
                _train_at_once(arrays, memory, start, stop, codes)
            _discard(memory, kept[row], codes)
            num_rows = row + 1
            continue
        tasks.append((start, stop, levels, row, True))
        tasks.append((start, splits[0], levels - 1, row, False))
        before = start
        for k in range(len(splits)):
            if num_rows == len(kept):
                kept = np.concatenate((kept, np.zeros_like(kept)))
            if memory.sizes[0] + 8 * count > len(codes):
                codes = np.concatenate((codes, np.empty_like(codes)))
            above = row if k == 0 else num_rows - 1
            kept[num_rows] = kept[above]
            _add_crossing(arrays, splits[k], stop, kept[num_rows])
            _advance(arrays, memory, before, splits[k], kept[num_rows], codes)
            last = splits[k + 1] if k + 1 < len(splits) else stop
            tasks.append((splits[k], last, levels - 1, num_rows, False))
            before = splits[k]
            num_rows += 1
    return codes[: memory.sizes[0]].copy()


@njit
def _split(cuts: _Cuts, start: int, stop: int, num_cuts: int) -> Ints:
    """Positions strictly between `start` and `stop`, at about equal memory; fewer where there are not as many."""
    allowed = cuts.after_points[
        np.searchsorted(cuts.after_points, start + 1) : np.searchsorted(cuts.after_points, stop)
    ]
    if len(allowed) == 0:
        allowed = np.arange(start + 1, stop)
    is_chosen = np.zeros(len(allowed), np.bool_)
    for cut in range(1, min(num_cuts, len(allowed)) + 1):
        target = cuts.held[start] + (cuts.held[stop] - cuts.held[start]) * cut / (num_cuts + 1)
        best = -1
        for k in range(len(allowed)):
            distance = abs(cuts.held[allowed[k]] - target)
            if not is_chosen[k] and (best < 0 or distance < abs(cuts.held[allowed[best]] - target)):
                best = k
        is_chosen[best] = True
    return allowed[is_chosen]


@njit
def _add_crossing(arrays: GraphArrays, position: int, stop: int, kept: Flags) -> None:
    """Marks the nodes before `position` that a run or a backward of the nodes from there to `stop` reads."""
    for k in range(arrays.read_start[position], arrays.read_start[stop]):
        if arrays.read[k] < position:
            kept[arrays.read[k]] = 1
    for k in range(arrays.saved_start[position], arrays.saved_start[stop]):
        if arrays.saved[k] < position:
            kept[arrays.saved[k]] = 1


@njit
def _advance(arrays: GraphArrays, memory: _Memory, start: int, stop: int, kept: Flags, codes: Small) -> None:
    """Runs what makes `kept` resident, all of the range if it is its first time; keeps nothing else."""
    if memory.sizes[1] < stop:
        for n in range(start, stop):
            _run(arrays, memory, n, codes)
        memory.sizes[1] = stop
    else:
        highest, pending = -1, 0
        for n in range(stop):
            if kept[n] and not memory.outputs[n]:
                memory.is_needed[n] = 1
                highest, pending = n, pending + 1
        lowest = mark_needed(arrays, memory.outputs, memory.is_needed, highest, pending)
        _run_needed(arrays, memory, lowest, highest, codes)
    _discard(memory, kept, codes)


@njit
def _train_at_once(arrays: GraphArrays, memory: _Memory, start: int, stop: int, codes: Small) -> None:
    if memory.sizes[1] < stop:
        for n in range(max(start, memory.sizes[1]), stop):
            _run(arrays, memory, n, codes)
        memory.sizes[1] = stop
    for n in range(stop - 1, start - 1, -1):
        lowest, highest = mark_missing(arrays, n, memory.outputs, memory.tapes, memory.is_needed)
        _run_needed(arrays, memory, lowest, highest, codes)
        codes[memory.sizes[0]] = 4 * n + BACKWARD
        memory.sizes[0] += 1


@njit
def _run_needed(arrays: GraphArrays, memory: _Memory, lowest: int, highest: int, codes: Small) -> None:
    for n in range(lowest, highest + 1):
        if memory.is_needed[n]:
            memory.is_needed[n] = 0
            _run(arrays, memory, n, codes)


@njit
def _run(arrays: GraphArrays, memory: _Memory, n: int, codes: Small) -> None:
    codes[memory.sizes[0]] = 4 * n + RUN
    memory.sizes[0] += 1
    memory.outputs[n] = 1
    memory.tapes[n] = arrays.tape_bytes[n] > 0


@njit
def _discard(memory: _Memory, kept: Flags, codes: Small) -> None:
    at = memory.sizes[0]
    for n in range(len(kept)):
        if memory.outputs[n] and not kept[n]:
            codes[at] = 4 * n + DISCARD
            at += 1
            memory.outputs[n] = 0
    for n in range(len(kept)):
        if memory.tapes[n]:
            codes[at] = 4 * n + DISCARD_TAPE
            at += 1
            memory.tapes[n] = 0
    memory.sizes[0] = at
