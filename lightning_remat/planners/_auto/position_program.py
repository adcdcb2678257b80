"""Dynamic program over positions in the node order: what to hold where a single local move would not see it.

A *position* is a place between two nodes of the order; what crosses it are the values made before it and read by
the forward after it, one for a chain, several where skips pass. Holding what crosses a position lets the forward
start again from there. The program is beaumont2024's over such positions in place of stages, with two additions: a
block may hold any of several choices of its inside, recomputing the rest from what crosses its start (Rotor's F_all
is the choice of all), and gradients are the graph's own levels. One run answers every budget. Its memory is a model;
the simulator of windows decides afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...schedules.compiled import Floats, Ints, Small, njit
from ...schedules.graph import Graph
from ...schedules.uses import last_reads, needed_runs, saved_roots
from .window_simulator import BEFORE, HIGHEST, NONE, Problem
from .windows import windows_between

NUM_SLOTS = 300
NUM_CHOICES = 8


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks between chosen positions; block b is the nodes (position[b], position[b + 1]].

    Attributes:
        position: [L + 1] last node before each block, from -1 to n - 1.
        crossing: [L + 1, L + 1] bytes made after position i that cross position k.
        crossers: For each position the roots that cross it.
        seconds: [L] forward seconds.
        forward_bytes: [L] transient peak of a forward run of the block, beyond what crosses its start.
        backward_bytes: [L] peak of the block's backwards with its inside resident, gradients included.
        level_bytes: [L] gradients before the block's backwards.
        held: For each block and choice the values held of its inside.
        held_bytes: [L, choices] their bytes, with what crosses the block's end.
        again_seconds: [L, choices] recomputation of what the choice does not hold.
    """

    position: list[int]
    crossing: Ints
    crossers: list[list[int]]
    seconds: Floats
    forward_bytes: Ints
    backward_bytes: Ints
    level_bytes: Ints
    held: list[list[set[int]]]
    held_bytes: Ints
    again_seconds: Floats


def cut(graph: Graph, problem: Problem, max_blocks: int) -> Blocks:
    """The graph cut at up to `max_blocks` positions, each the narrowest of its share of the saved bytes."""
    count = len(graph.nodes)
    roots, nodes = graph.roots, graph.nodes
    last_read = last_reads(graph)
    saved = saved_roots(graph)
    ends: list[list[int]] = [[] for _ in range(count + 1)]
    for v in range(count):
        if roots[v] == v:
            ends[last_read[v]].append(v)
    width, widths = 0, list[int]()
    for n in range(count):
        width += nodes[n].output_bytes
        width -= sum(nodes[v].output_bytes for v in ends[n])
        widths.append(width)
    position = _positions(graph, widths, saved, max_blocks)
    num_blocks = len(position) - 1
    crossers = [[v for v in range(p + 1) if roots[v] == v and last_read[v] > p] for p in position]
    crossing = np.zeros((num_blocks + 1, num_blocks + 1), np.int64)
    for k, values in enumerate(crossers):
        for i in range(k):
            crossing[i, k] = sum(nodes[v].output_bytes for v in values if v > position[i])
    seconds = np.zeros(num_blocks)
    forward, backward, level = (np.zeros(num_blocks, np.int64) for _ in range(3))
    held_bytes = np.zeros((num_blocks, NUM_CHOICES), np.int64)
    again = np.zeros((num_blocks, NUM_CHOICES))
    held: list[list[set[int]]] = []
    for b in range(num_blocks):
        first, last = position[b] + 1, position[b + 1]
        inside = range(first, last + 1)
        seconds[b] = sum(nodes[n].forward_seconds for n in inside)
        live = 0
        for n in inside:
            extra = nodes[n].tape_bytes + nodes[n].forward_workspace_bytes
            live += nodes[n].output_bytes
            forward[b] = max(forward[b], live + extra)
            live -= sum(nodes[v].output_bytes for v in ends[n] if v >= first)
        level[b] = problem.levels[last, BEFORE]
        wanted = [v for v in inside if v in saved]
        tapes = [count + n for n in inside if nodes[n].tape_bytes]
        size = {v: nodes[v].output_bytes for v in wanted} | {v: nodes[v - count].tape_bytes for v in tapes}
        backward[b] = _backward_peak(graph, problem, first, last, size)
        choices = _choices(graph, size)
        held.append(choices)
        for o, choice in enumerate(choices):
            both = choice | {v for v in crossers[b + 1] if v >= first}
            held_bytes[b, o] = sum(size[v] if v in size else nodes[v].output_bytes for v in both)
            again[b, o] = _again(graph, first, choice, size)
    return Blocks(position, crossing, crossers, seconds, forward, backward, level, held, held_bytes, again)


def _positions(graph: Graph, widths: list[int], saved: set[int], max_blocks: int) -> list[int]:
    count = len(graph.nodes)
    if count <= max_blocks:
        return list(range(-1, count))
    weights = [n.tape_bytes + n.output_bytes * (v in saved) for v, n in enumerate(graph.nodes)]
    share = (np.cumsum(weights) / max(1, sum(weights)) + np.arange(1, count + 1) / count) / 2 * max_blocks
    best: dict[int, int] = {}
    for p in range(count - 1):
        k = int(share[p])
        if k not in best or widths[p] < widths[best[k]]:
            best[k] = p
    return [-1, *sorted(best.values()), count - 1]


def _backward_peak(graph: Graph, problem: Problem, first: int, last: int, size: dict[int, int]) -> int:
    """The most during the block's backwards when its saved values are resident until their last use."""
    count = len(graph.nodes)
    needed_by: dict[int, int] = {}  # value -> first node whose backward reads it, which is the last to do so
    for n in range(last, first - 1, -1):
        for i in graph.nodes[n].saved:
            if graph.roots[i] >= first:
                needed_by[graph.roots[i]] = n
        if graph.nodes[n].tape_bytes:
            needed_by[count + n] = n
    live = sum(size[v] for v in needed_by if v in size)
    peak = 0
    for n in range(last, first - 1, -1):
        peak = max(peak, live + int(problem.levels[n, HIGHEST]))
        live -= sum(size[v] for v, by in needed_by.items() if by == n and v in size)
    return peak


def _choices(graph: Graph, size: dict[int, int]) -> list[set[int]]:
    """From all values of a block to none, those dropped first that free the most bytes for a second."""
    count = len(graph.nodes)
    ranked = sorted(size, key=lambda v: -graph.nodes[v % count].forward_seconds / max(1, size[v]))
    total, running = sum(size.values()), 0
    choices: list[set[int]] = [set(ranked)]
    marks = [total * k / (NUM_CHOICES - 1) for k in range(NUM_CHOICES - 2, 0, -1)]
    for most in marks:
        chosen: set[int] = set()
        running = 0
        for v in ranked:
            if running + size[v] <= most:
                chosen.add(v)
                running += size[v]
        choices.append(chosen)
    choices.append(set())
    return choices


def _again(graph: Graph, first: int, choice: set[int], size: dict[int, int]) -> float:
    """Seconds to make the values of a block that `choice` does not hold, once each."""
    count = len(graph.nodes)
    wanted = (v % count for v in size if v not in choice)
    runs = needed_runs(graph, wanted, lambda i: graph.roots[i] < first or graph.roots[i] in choice)
    return sum(graph.nodes[m].forward_seconds for m in runs)


@njit
def fill(
    seconds: Floats, again: Floats, held: Ints, crossing: Ints, forward: Ints, backward: Ints, level: Ints, slots: int
) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
    """cost[i, j, m]: least forward seconds to run and undo blocks i to j - 1 in m slots beside what crosses i.

    The choice is o >= 0: block i holds its choice o and the rest follows; -k: the forward holds what crosses
    k and undoes k to j - 1 first; `NONE`: impossible.
    """
    num = len(seconds)
    cost = np.full((num + 1, num + 1, slots + 1), np.float32(np.inf), np.float32)
    choice = np.full((num + 1, num + 1, slots + 1), 1 << 14, np.int16)
    for length in range(1, num + 1):
        for i in range(num - length + 1):
            j = i + length
            run = 0.0
            most = 0
            for k in range(i + 1, j + 1):
                run += seconds[k - 1]
                most = max(most, (crossing[i, k - 1] if k - 1 > i else 0) + forward[k - 1])
                start = max(most + level[j - 1], backward[i] if k == i + 1 else 0)
                if k == i + 1:
                    if j == k:
                        for m in range(min(start, slots + 1), slots + 1):
                            cost[i, j, m] = run
                            choice[i, j, m] = 0
                        continue
                    for o in range(held.shape[1]):
                        for m in range(max(start, held[i, o]), slots + 1):
                            now = run + again[i, o] + cost[k, j, m - held[i, o]]
                            if now < cost[i, j, m]:
                                cost[i, j, m] = now
                                choice[i, j, m] = o
                if k < j:
                    for m in range(max(start, crossing[i, k]), slots + 1):
                        now = run + cost[k, j, m - crossing[i, k]] + cost[i, k, m]
                        if now < cost[i, j, m]:
                            cost[i, j, m] = now
                            choice[i, j, m] = -k
    return cost, choice


class Program:
    """The filled tables, which answer every budget."""

    def __init__(self, graph: Graph, problem: Problem, most_bytes: int, max_blocks: int) -> None:
        self.graph, self.problem = graph, problem
        self.blocks = blocks = cut(graph, problem, max_blocks)
        nothing = np.zeros(len(graph.nodes), np.bool_)
        self.absent = windows_between(graph, problem, nothing, nothing, 2 * len(graph.nodes))
        self.unit = max(1, -(-(most_bytes - problem.fixed_bytes) // NUM_SLOTS))
        self._answers: dict[int, Small] = {}
        self._crossers: list[Small] = [np.array(values, np.int32) for values in blocks.crossers]
        self._held: list[list[Small]] = [[np.array(sorted(c), np.int32) for c in block] for block in blocks.held]

        def slots(sizes: Ints) -> Ints:
            return (sizes + self.unit // 2) // self.unit  # a model: to the nearest, the simulator decides

        self._held_slots, self._crossing_slots = slots(blocks.held_bytes), slots(blocks.crossing)
        self.cost, self.choice = fill(
            blocks.seconds, blocks.again_seconds, self._held_slots, self._crossing_slots,
            slots(blocks.forward_bytes), slots(blocks.backward_bytes), slots(blocks.level_bytes), NUM_SLOTS,
        )  # fmt: skip

    def windows(self, limit_bytes: int) -> Small | None:
        """The program's answer for a peak of `limit_bytes`, or None where its model finds none.

        Limits in the same slot have the same answer, the very same array.
        """
        num = len(self.blocks.seconds)
        slots = min(NUM_SLOTS, (limit_bytes - self.problem.fixed_bytes) // self.unit)
        if slots < 0 or not np.isfinite(self.cost[0, num, slots]):
            return None
        if slots not in self._answers:
            self._answers[slots] = self._backtracked(int(slots))
        return self._answers[slots]

    def _backtracked(self, slots: int) -> Small:
        num = len(self.blocks.seconds)
        windows = self.absent.copy()
        stack = [(0, num, slots, -1)]
        while stack:
            i, j, m, since = stack.pop()
            chosen = int(self.choice[i, j, m])
            if chosen >= 0:
                self._hold_block(windows, i, chosen, since)
                if j > i + 1:
                    stack.append((i + 1, j, m - int(self._held_slots[i, chosen]), since))
            else:
                k = -chosen
                _hold(windows, self._crossers[k], self.blocks.position[i] + 1, since)
                stack.append((k, j, m - int(self._crossing_slots[i, k]), since))
                stack.append((i, k, m, 2 * len(self.graph.nodes) - 1 - self.blocks.position[k]))
        return windows

    def _hold_block(self, windows: Small, b: int, chosen: int, since: int) -> None:
        """Holds a block's choice and what crosses its end from step `since` on, the rest from its backward."""
        first, last = self.blocks.position[b] + 1, self.blocks.position[b + 1]
        count = len(self.graph.nodes)
        begin = 2 * count - 1 - last
        _hold(windows, self._crossers[b + 1], first, since)
        _hold(windows, self._held[b][chosen], first, since)
        _hold(windows, self._held[b][0], first, begin)


@njit
def _hold(windows: Small, values: Small, first: int, since: int) -> None:
    """Ends the absence of those of the values that are made at node `first` or later at step `since`."""
    for v in values:
        start, end = windows[v, 0]
        if v < first or start == NONE or since >= end:
            continue
        if since <= start:
            windows[v, 0] = NONE
        else:
            windows[v, 0, 1] = since
