"""Builds the whole trade-off of a graph once; every budget is then a look-up, so more budget is never slower."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..graph import Graph
from .descent import Search, State
from .fast_simulator import Problem, Small, pack
from .floor import find_floor
from .front import Front
from .position_program import Program
from .progress import SearchProgress

NUM_LEVELS = 57
"""Budgets between floor and plain peak at which the search works; a multiple of 19, for tables of 20 budgets."""

ACTIONS_PER_EFFORT = 40_000_000
"""Replayed actions of a search with effort 1: some five seconds."""


@lru_cache(maxsize=8)
def build_front(graph: Graph, effort: float = 1.0) -> tuple[Problem, Front]:
    """All the trade-offs found between plain autograd and the lowest peak.

    Deterministic: the effort is counted in replayed actions, not in time.

    Args:
        graph: The operations.
        effort: Multiple of the usual search.
    """
    problem, front = pack(graph), Front()
    with SearchProgress(f"planning {len(graph.nodes)} operations") as progress:
        builder = _Builder(graph, problem, front, progress)
        builder.find_lowest()
        builder.sweep()
        builder.polish(int(effort * ACTIONS_PER_EFFORT))
    return problem, front


class _Builder:
    def __init__(self, graph: Graph, problem: Problem, front: Front, progress: SearchProgress) -> None:
        self.progress = progress
        self.problem, self.front = problem, front
        self.search = Search(problem, front.offer)
        self.plain = self.search.plain()
        self.bound = find_floor(graph).bytes
        self.programs = [Program(graph, problem, self.plain.peak_bytes, blocks) for blocks in (16, 40, 100)]

    def find_lowest(self) -> None:
        """Goes down from plain autograd in steps, and from the dynamic programs, until nothing gets lower."""
        span = self.plain.peak_bytes - self.bound
        state = self.plain
        for k in range(19, -1, -1):
            limit = self.bound + span * k // 20
            self.progress.update((19 - k) / 60, "the lowest peak")
            state = self._step_down(state, limit)
            for seed in self._seeds(limit):
                self._settle(seed, limit, probes=8)
            if self.front.peaks[0] > limit:
                break
        low, high = self.bound, self.front.peaks[0]
        for _ in range(7):
            limit = (low + high) // 2
            for seed in [self._best(high), *self._seeds(high, most=4)]:
                if self._settle(seed, limit, probes=12).peak_bytes <= limit:
                    break
            if self.front.peaks[0] <= limit:
                high = self.front.peaks[0]
            else:
                low = limit

    def levels(self) -> list[int]:
        """The budgets to work at, from the highest to the lowest."""
        low, high = self.front.peaks[0], self.plain.peak_bytes
        return sorted({low + (high - low) * k // NUM_LEVELS for k in range(NUM_LEVELS)}, reverse=True)

    def sweep(self) -> None:
        """Down and up all levels, each level starting from its neighbour and from the best known."""
        state = self.plain
        for k, limit in enumerate(self.levels()):
            self.progress.update(1 / 3 + k / NUM_LEVELS / 3, "budget by budget")
            state = self._step_down(state, limit)
            for seed in self._seeds(limit):
                self._settle(seed, limit)
        for limit in reversed(self.levels()):
            self.search.refill(self._best(limit), limit)

    def polish(self, num_actions: int) -> None:
        """Kicks at every level in turn until the effort is spent."""
        random = np.random.default_rng(0)
        first = self.search.num_actions
        last = first + num_actions
        while self.search.num_actions < last:
            for limit in self.levels():
                self.progress.update(2 / 3 + (self.search.num_actions - first) / num_actions / 3, "improving")
                self.search.kick(self._best(limit), limit, random)
                if self.search.num_actions >= last:
                    break

    def _step_down(self, state: State, limit: int) -> State:
        down = self._settle(state, limit, probes=4)
        best = self._best(limit) if self.front.peaks[0] <= limit else down
        return down if down.peak_bytes <= limit and down.seconds <= best.seconds else best

    def _settle(self, state: State, limit: int, probes: int = 0) -> State:
        down = self.search.descend(state, limit, probes=probes)
        return self.search.refill(down, limit) if down.peak_bytes <= limit else down

    def _best(self, limit: int) -> State:
        index = self.front.within(limit)
        assert index is not None, "no level lies below the lowest peak"
        return self._state(self.front.peaks[index], self.front.seconds[index], self.front.windows(self.problem, index))

    def _state(self, peak: int, seconds: float, windows: Small) -> State:
        return State(peak, seconds, windows)

    def _seeds(self, limit: int, most: int = 2) -> list[State]:
        """The programs' answers near the limit that may beat the best known after a local search."""
        known = self.front.within(limit)
        overhead = np.inf if known is None else self.front.seconds[known] - self.plain.seconds
        room = limit - self.problem.fixed_bytes
        ranked: list[tuple[float, State]] = []
        for program in self.programs:
            for share in (1.08, 1.0, 0.93, 0.85):
                windows = program.windows(self.problem.fixed_bytes + int(room * share))
                if windows is None:
                    continue
                peak, seconds, num_actions = self.search.replay(windows)
                above = max(0.0, (peak - limit) / max(1, room))
                if num_actions and above < 0.2 and seconds - self.plain.seconds < 2.5 * overhead:
                    ranked.append(((seconds - self.plain.seconds) * (1 + 5 * above), State(peak, seconds, windows)))
        ranked.sort(key=lambda pair: pair[0])
        return [state for _, state in ranked[:most]]
