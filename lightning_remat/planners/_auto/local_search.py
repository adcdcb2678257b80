"""Local search over absence windows at the true peak: drop until the limit holds, hold again what fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ...schedules.compiled import Small
from . import constants
from .exchange import propose
from .intervals import END, HELD, START, VALUE, change_over, excess_of, try_gaps
from .moves import LEAST_SECONDS, Memory, choose_drops, choose_holds, empty_memory, forget, list_drops
from .window_simulator import NONE, Problem, Work, no_windows, replay, work_for


@dataclass(frozen=True, slots=True)
class State:
    """A choice of windows with its cost."""

    peak_bytes: int
    seconds: float
    windows: Small


@dataclass(slots=True)
class Search:
    """What the moves share: the problem, scratch memory, a count of the work done and a watcher of what was found.

    Attributes:
        problem: The graph as arrays.
        found: Called with every state that the search passes through.
        most_actions: Replayed actions after which one `descend`, `refill` or `exchange` ends where it is: in a graph
            of thousands of nodes, near its lowest peak, thousands of moves each gain next to nothing.
        num_actions: Actions replayed so far, the measure of effort: unlike time, the same in every run.
        guesses: Seconds that dropping a gap cost when last tried.
        savings: Seconds that holding a gap saved when last tried, 0 where the limit forbids it.
        most_moves: How many about equally good moves are made at a time.
    """

    problem: Problem
    found: Callable[[int, float, Small], None]
    most_actions: int
    work: Work = field(init=False)
    num_actions: int = 0
    guesses: Memory = field(default_factory=empty_memory)
    savings: Memory = field(default_factory=empty_memory)
    most_moves: int = field(init=False)

    def __post_init__(self) -> None:
        self.most_moves = 1 + len(self.problem.is_pinned) // constants.NODES_PER_MOVE
        self.work = work_for(self.problem)

    def replay(self, windows: Small) -> tuple[int, float, int]:
        """Peak, seconds and number of actions of `windows`, which the watcher is shown."""
        peak, seconds, num_actions = replay(self.problem, windows, self.work)
        self.num_actions += num_actions + constants.ACTIONS_PER_CALL
        if num_actions:
            self.found(peak, seconds, windows)
        return peak, seconds, num_actions

    def plain(self) -> State:
        """The state that keeps everything."""
        windows = no_windows(self.problem)
        peak, seconds, _ = self.replay(windows)
        return State(peak, seconds, windows)

    def descend(self, state: State, limit: int, *, probes: int = 0) -> State:
        """A state whose peak is within `limit` where drops reach one, else as far down as they lead.

        Each drop is the one that frees the most bytes above the limit for a second of recomputation, all costs
        replayed. Where no single drop frees any, up to `probes` at the highest step are followed further, as
        a drop may pay only after others.
        """
        windows = state.windows.copy()
        last = self.num_actions + self.most_actions
        peak, seconds, num_actions = self.replay(windows)
        while num_actions and peak > limit and self.num_actions < last:
            drops = self._best_drops(windows, seconds, num_actions, limit)
            for row in drops:
                change_over(windows, row)
            if not len(drops) and not (probes and self._probe(windows, limit, probes)):
                break
            peak, seconds, num_actions = self.replay(windows)
        return State(peak, seconds, windows)

    def _best_drops(self, windows: Small, seconds: float, num_actions: int, limit: int) -> Small:
        """The held gap to drop, in large graphs with others about as good; none where none lowers the excess."""
        chosen = choose_drops(
            self.problem, windows, self.work, self.guesses, seconds, num_actions, limit, self.most_moves
        )
        self.num_actions += chosen.num_replayed + constants.ACTIONS_PER_CALL
        return chosen.rows

    def _probe(self, windows: Small, limit: int, probes: int) -> bool:
        """Follows drops at the highest step until one lowers the excess after all; whether one did."""
        _, seconds, num_actions = replay(self.problem, windows, self.work)
        excess = excess_of(self.work, limit)
        highest = int(self.work.most.argmax())
        rows, _, _ = list_drops(self.problem, self.work, num_actions, limit)
        rows = rows[(rows[:, START] + 2 - rows[:, HELD] <= highest) & (rows[:, END] > highest)]
        if not len(rows):
            return False
        _, new_seconds, new_excess, replayed = try_gaps(self.problem, windows, self.work, rows, limit)
        self.num_actions += replayed + constants.ACTIONS_PER_CALL
        order = np.argsort(new_excess + excess * (new_seconds - seconds) / seconds, kind="stable")
        for k in order[:probes].tolist():
            trial = windows.copy()
            if not change_over(trial, rows[k]):
                continue
            for _ in range(constants.PROBE_STEPS):
                _, now, num_actions = self.replay(trial)
                if not num_actions:
                    break
                if excess_of(self.work, limit) < excess:
                    windows[:] = trial
                    return True
                drops = self._best_drops(trial, now, num_actions, limit)
                if not len(drops):
                    break
                for row in drops:
                    change_over(trial, row)
        return False

    def refill(self, state: State, limit: int) -> State:
        """The state after holding again, one gap at a time, what saves the most seconds within `limit`."""
        windows = state.windows.copy()
        last = self.num_actions + self.most_actions
        peak, seconds, num_actions = self.replay(windows)
        forget(self.savings)
        while num_actions and self.num_actions < last:
            chosen = choose_holds(
                self.problem,
                windows,
                self.work,
                self.savings,
                seconds,
                num_actions,
                limit,
                self.most_moves,
                max(0, last - self.num_actions),
            )
            self.num_actions += chosen.num_replayed + constants.ACTIONS_PER_CALL
            if not len(chosen.rows):
                break
            for number, row in enumerate(chosen.rows):
                values = [v for v in (row[VALUE], row[VALUE + 4]) if v >= 0]
                before = windows[values].copy()
                change_over(windows, row)
                new_peak, new_seconds, new_num_actions = self.replay(windows)
                if number and not (new_peak <= limit and new_seconds < seconds):
                    windows[values] = before
                    peak, seconds, num_actions = self.replay(windows)
                    break
                peak, seconds, num_actions = new_peak, new_seconds, new_num_actions
        return State(peak, seconds, windows)

    def exchange(self, state: State, limit: int) -> State:
        """The state after exchanges of one or two gaps for one or two others, while they save seconds."""
        last = self.num_actions + self.most_actions
        better: State | None = state
        while better is not None and self.num_actions < last:
            state = better
            better = self._exchange_once(state, limit)
        return state if better is None else better

    def _exchange_once(self, state: State, limit: int) -> State | None:
        _, _, num_actions = self.replay(state.windows)
        moves, num_sets = propose(self.problem, self.work, self.guesses, num_actions, limit, constants.MOST_EXCHANGES)
        self.num_actions += num_sets + constants.ACTIONS_PER_CALL
        for rows in moves:
            windows = state.windows.copy()
            if all(change_over(windows, row) for row in rows if row[VALUE] >= 0):
                peak, seconds, num_actions = self.replay(windows)
                if num_actions and peak <= limit and seconds < state.seconds - LEAST_SECONDS:
                    return self.refill(State(peak, seconds, windows), limit)
        return None

    def kick(self, state: State, limit: int, random: np.random.Generator) -> State:
        """A neighbour of `state`: absences of a random stretch of nodes are lifted, then the limit is restored."""
        self.num_actions += constants.ACTIONS_PER_CALL
        windows = state.windows.copy()
        count = len(self.problem.is_pinned)
        absent = np.flatnonzero(windows[:, 0, 0] < 2 * count)
        if not len(absent):
            return state
        place = absent % count
        reach = 1 + int(random.integers(1, 2 + len(absent) // int(random.choice(constants.KICK_PARTS))))
        order = np.argsort(np.abs(place - place[random.integers(len(absent))]), kind="stable")[:reach]
        chosen = absent[order[random.random(len(order)) < random.choice(constants.KICK_SHARES)]]
        windows[chosen] = NONE
        forget(self.guesses)
        down = self.descend(State(0, 0.0, windows), limit)
        return self.refill(down, limit) if down.peak_bytes <= limit else down
