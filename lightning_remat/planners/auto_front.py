"""Builds the whole trade-off of a graph once; every budget is then a look-up, so more budget is never slower."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache

import numpy as np

from ..errors import InfeasibleBudgetError
from ..graph import Graph
from .descent import Search, State
from .fast_simulator import Problem, pack
from .floor import find_floor
from .front import Front
from .kusumoto import plan_kusumoto_approx
from .periodic import plan_periodic
from .position_program import Program
from .progress import SearchProgress
from .windows import windows_of

NUM_LEVELS = 57
"""Budgets between floor and plain peak at which the search works; a multiple of 19, for tables of 20 budgets."""

NUM_FIRST_LEVELS = 20

ACTIONS_PER_EFFORT = 110_000_000
"""Replayed actions of a search with effort 1: some five seconds, and more for graphs beyond `USUAL_NODES`."""

USUAL_NODES = 1200

MAX_IDLE_ROUNDS = 6

MAX_RIVAL_NODES = 700


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
        builder = FrontBuilder(graph, problem, front, progress, effort)
        builder.find_lowest()
        builder.sweep()
        builder.polish()
    return problem, front


class FrontBuilder:
    """The three parts of the search, which share the front, the effort and a watcher."""

    def __init__(
        self, graph: Graph, problem: Problem, front: Front, progress: SearchProgress, effort: float = 1.0
    ) -> None:
        self.graph, self.problem, self.front, self.progress = graph, problem, front, progress
        self.search = Search(problem, front.offer)
        self.plain = self.search.plain()
        self.bound = find_floor(graph).bytes
        self.programs = [Program(graph, problem, self.plain.peak_bytes, blocks) for blocks in (16, 40, 100)]
        self.last = int(effort * ACTIONS_PER_EFFORT * max(1.0, len(graph.nodes) / USUAL_NODES))

    def find_lowest(self) -> None:
        """Goes down from plain autograd in steps, and from the dynamic programs, until nothing gets lower."""
        self._show_segments()
        span = self.plain.peak_bytes - self.bound
        state = self.plain
        for k in range(NUM_FIRST_LEVELS - 1, -1, -1):
            limit = self.bound + span * k // NUM_FIRST_LEVELS
            self._tell(1 - k / NUM_FIRST_LEVELS, "the lowest peak")
            if self.search.num_actions < 0.3 * self.last:
                state = self._step_down(state, limit)
                if self.front.peaks[0] > limit:
                    break
            else:  # too large a graph to walk down: from here on the programs lead
                for seed in self._seeds(limit):
                    self._settle(seed, limit)
        low, high = self.bound, self.front.peaks[0]
        for _ in range(7):
            limit = (low + high) // 2
            for seed in [self._best(high), *self._seeds(high, most=4)]:
                if self._settle(seed, limit, probes=12).peak_bytes <= limit:
                    break
                if self.search.num_actions > 0.5 * self.last:
                    break
            if self.front.peaks[0] <= limit:
                high = self.front.peaks[0]
            else:
                low = limit
            if low >= high or self.search.num_actions > 0.5 * self.last:
                break

    def levels(self) -> list[int]:
        """The budgets to work at, from the highest to the lowest."""
        low, high = self.front.peaks[0], self.plain.peak_bytes
        return [low + (high - low) * k // NUM_LEVELS for k in range(NUM_LEVELS - 1, -1, -1)]

    def sweep(self) -> None:
        """Down and up the levels, each starting from its neighbour and from the best known; first every third."""
        levels = self.levels()
        thirds = [levels[2::3], levels[0::3], levels[1::3]]
        for number, chosen in enumerate(thirds):
            state = self.plain
            for k, limit in enumerate(chosen):
                if not number and k % 2 == 0:
                    self._ask_rivals(limit)
                if self.search.num_actions > (0.75 if number else 1.0) * self.last:
                    break
                self._tell((number + k / len(chosen)) / 3, "budget by budget")
                state = self._step_down(self._best(state.peak_bytes), limit)
        for limit in reversed(levels):
            if self.search.num_actions > 1.1 * self.last:
                break
            self.search.refill(self._best(limit), limit)

    def polish(self) -> None:
        """Kicks at every level in turn until the effort is spent or several rounds in a row have found nothing."""
        random = np.random.default_rng(0)
        last = max(self.last, self.search.num_actions + self.last // 8)
        idle_rounds = 0
        while self.search.num_actions < last and idle_rounds < MAX_IDLE_ROUNDS:
            before = list(self.front.seconds), list(self.front.peaks)
            for limit in self.levels():
                self._tell(self.search.num_actions / last, "improving")
                self.search.kick(self._best(limit), limit, random)
                if self.search.num_actions >= last:
                    break
            idle_rounds = 0 if before != (self.front.seconds, self.front.peaks) else idle_rounds + 1

    def _ask_rivals(self, limit: int) -> None:
        """Takes in the answer of the quickest lower-set planner, improved; large graphs go without."""
        if len(self.graph.nodes) <= MAX_RIVAL_NODES:
            with suppress(InfeasibleBudgetError):
                windows = windows_of(self.graph, self.problem, plan_kusumoto_approx(self.graph, limit))
                self._settle(State(0, 0.0, windows), limit)

    def _show_segments(self) -> None:
        """Takes in a few equal cuts, which hold what no single drop leads to."""
        for segments in (2, 3, 4, 6, 8, 12, 16, 24):
            if segments <= len(self.graph.nodes) <= MAX_RIVAL_NODES:
                schedule = plan_periodic(self.graph, 1 << 62, segments=segments)
                self.search.replay(windows_of(self.graph, self.problem, schedule))

    def _tell(self, fraction: float, stage: str) -> None:
        self.progress.update(fraction, stage)

    def _step_down(self, state: State, limit: int) -> State:
        """From `state` and the programs to `limit`; the fastest known there, or how far down `state` led."""
        down = self._settle(state, limit, probes=4)
        for seed in self._seeds(limit):
            self._settle(seed, limit, probes=4)
        return down if self.front.within(limit) is None else self._best(limit)

    def _settle(self, state: State, limit: int, probes: int = 0) -> State:
        down = self.search.descend(state, limit, probes=probes)
        return self.search.refill(down, limit) if down.peak_bytes <= limit else down

    def _best(self, limit: int) -> State:
        index = self.front.within(limit)
        assert index is not None, "no level lies below the lowest peak"
        return State(self.front.peaks[index], self.front.seconds[index], self.front.windows(self.problem, index))

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
