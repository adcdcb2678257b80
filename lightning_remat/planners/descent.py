"""Local search over absence windows at the true peak: drop until the limit holds, hold again what fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .fast_simulator import NONE, Ints, Problem, Small, Work, no_windows, replay, work_for
from .gaps import END, HELD, START, VALUE, change_over, excess_of, find_room, list_gaps, try_gaps, with_twins

BATCH = 12
"""Moves tried at a time, best guess first."""

NODES_PER_MOVE = 150
"""A graph of so many nodes takes one more move a time."""

LEAST_SECONDS = 1e-9

ACTIONS_PER_CALL = 1500
"""What the Python around a call costs, in replayed actions."""


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
        num_actions: Actions replayed so far, the measure of effort: unlike time, the same in every run.
        guesses: Seconds that dropping a gap cost when last tried.
    """

    problem: Problem
    found: Callable[[int, float, Small], None]
    work: Work = field(init=False)
    num_actions: int = 0
    guesses: dict[tuple[int, ...], float] = field(default_factory=dict[tuple[int, ...], float])

    def __post_init__(self) -> None:
        self.work = work_for(self.problem)

    def replay(self, windows: Small) -> tuple[int, float, int]:
        """Peak, seconds and number of actions of `windows`, which the watcher is shown."""
        peak, seconds, num_actions = replay(self.problem, windows, self.work)
        self.num_actions += num_actions + ACTIONS_PER_CALL
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
        peak, seconds, num_actions = self.replay(windows)
        while num_actions and peak > limit:
            drops = self._best_drops(windows, seconds, num_actions, limit)
            for row in drops:
                change_over(windows, row)
            if drops:
                pass
            elif not probes or not self._probe(windows, limit, probes):
                break
            peak, seconds, num_actions = self.replay(windows)
        return State(peak, seconds, windows)

    def _best_drops(self, windows: Small, seconds: float, num_actions: int, limit: int) -> list[Small]:
        """The held gap to drop, in large graphs with others about as good; none where none lowers the excess."""
        excess = excess_of(self.work, limit)
        rows, gains = self._drops(num_actions, limit)
        if not len(rows):
            return []
        keys = [tuple(r) for r in rows.tolist()]
        guessed = np.array([max(self.guesses.get(key, LEAST_SECONDS), LEAST_SECONDS) for key in keys])
        worth = gains / guessed
        order = np.argsort(-worth, kind="stable")
        best = 0.0
        tried: list[tuple[float, float, int]] = []
        for at in range(0, min(len(order), 4 * BATCH), BATCH):
            chosen = order[at : at + BATCH]
            if best >= worth[chosen[0]]:
                break
            _, new_seconds, new_excess = self._try(windows, rows[chosen], limit)
            for k, s, e in zip(chosen.tolist(), new_seconds.tolist(), new_excess.tolist(), strict=True):
                self.guesses[keys[k]] = cost = max(s - seconds, LEAST_SECONDS)
                if e < excess:
                    best = max(best, (excess - e) / cost)
                    tried.append(((excess - e) / cost, excess - e, k))
        tried.sort(reverse=True)
        drops: list[Small] = []
        for value, lowered, k in tried[: 1 + len(self.problem.seconds) // NODES_PER_MOVE]:
            if excess <= 0 or value < 0.9 * best:
                break
            excess -= lowered
            drops.append(rows[k])
        return drops

    def _drops(self, num_actions: int, limit: int) -> tuple[Small, Ints]:
        """Held gaps over steps above the limit, and the most that each may free there."""
        rows, sizes, seconds = with_twins(*list_gaps(self.problem, self.work, num_actions), len(self.problem.seconds))
        over = np.maximum(self.work.most - limit, 0)
        total = np.concatenate([[0], np.cumsum(over)])
        steps = np.concatenate([[0], np.cumsum(over > 0)])
        start, end = rows[:, START] + 1, rows[:, END]
        gains = np.minimum(sizes * (steps[end] - steps[start]), total[end] - total[start])
        useful = (rows[:, HELD] == 1) & (gains > 0)
        rows, gains = rows[useful], gains[useful]
        for row, s in zip(rows.tolist(), seconds[useful].tolist(), strict=True):
            self.guesses.setdefault(tuple(row), s)
        return rows, gains

    def _try(self, windows: Small, rows: Small, limit: int) -> tuple[Ints, Ints, Ints]:
        peaks, seconds, excess, num_actions = try_gaps(self.problem, windows, self.work, rows, limit)
        self.num_actions += num_actions + ACTIONS_PER_CALL
        return peaks, seconds, excess

    def _probe(self, windows: Small, limit: int, probes: int) -> bool:
        """Follows drops at the highest step until one lowers the excess after all; whether one did."""
        _, seconds, num_actions = replay(self.problem, windows, self.work)
        excess = excess_of(self.work, limit)
        highest = int(self.work.most.argmax())
        rows, _ = self._drops(num_actions, limit)
        rows = rows[(rows[:, START] < highest) & (rows[:, END] > highest)]
        if not len(rows):
            return False
        _, new_seconds, new_excess = self._try(windows, rows, limit)
        order = np.argsort(new_excess + excess * (new_seconds - seconds) / seconds, kind="stable")
        for k in order[:probes].tolist():
            trial = windows.copy()
            if not change_over(trial, rows[k]):
                continue
            for _ in range(16):
                _, now, num_actions = self.replay(trial)
                if not num_actions:
                    break
                if excess_of(self.work, limit) < excess:
                    windows[:] = trial
                    return True
                drops = self._best_drops(trial, now, num_actions, limit)
                if not drops:
                    break
                for row in drops:
                    change_over(trial, row)
        return False

    def refill(self, state: State, limit: int) -> State:
        """The state after holding again, one gap at a time, what saves the most seconds within `limit`."""
        windows = state.windows.copy()
        peak, seconds, num_actions = self.replay(windows)
        savings: dict[tuple[int, ...], float] = {}  # by gap, when last tried; 0 where the limit forbids it
        while num_actions:
            rows, guesses = self._holds(num_actions, limit)
            if not len(rows):
                break
            keys = [tuple(r) for r in rows.tolist()]
            worth = np.array([savings.get(key, guess) for key, guess in zip(keys, guesses.tolist(), strict=True)])
            order = np.argsort(-worth, kind="stable")
            best = LEAST_SECONDS
            tried: list[tuple[float, int]] = []
            for at in range(0, len(order), BATCH):
                chosen = order[at : at + BATCH]
                if best >= worth[chosen[0]]:
                    break
                peaks, new_seconds, _ = self._try(windows, rows[chosen], limit)
                for k, p, s in zip(chosen.tolist(), peaks.tolist(), new_seconds.tolist(), strict=True):
                    savings[keys[k]] = saved = seconds - s if p <= limit else 0.0
                    best = max(best, saved)
                    tried.append((saved, k))
            if best <= LEAST_SECONDS:
                break
            tried.sort(reverse=True)
            for number, (saved, k) in enumerate(tried[: 1 + len(self.problem.seconds) // NODES_PER_MOVE]):
                if saved < 0.9 * best:
                    break
                values = [v for v in (rows[k, VALUE], rows[k, VALUE + 4]) if v >= 0]
                before = windows[values].copy()
                change_over(windows, rows[k])
                new_peak, new_seconds, new_num_actions = self.replay(windows)
                if number and not (new_peak <= limit and new_seconds < seconds):
                    windows[values] = before
                    break
                peak, seconds, num_actions = new_peak, new_seconds, new_num_actions
            else:
                continue
            if number:
                peak, seconds, num_actions = self.replay(windows)
        return State(peak, seconds, windows)

    def _holds(self, num_actions: int, limit: int) -> tuple[Small, Ints]:
        """Absent gaps with room for the value on the way, and the seconds of the run that would be saved."""
        rows, sizes, seconds = with_twins(*list_gaps(self.problem, self.work, num_actions), len(self.problem.seconds))
        has_room = find_room(rows, sizes, self.work, limit)
        return rows[has_room], seconds[has_room]

    def kick(self, state: State, limit: int, random: np.random.Generator) -> State:
        """A neighbour of `state`: absences of a random stretch of nodes are lifted, then the limit is restored."""
        self.num_actions += ACTIONS_PER_CALL
        windows = state.windows.copy()
        count = len(self.problem.seconds)
        absent = np.flatnonzero(windows[:, 0, 0] < 2 * count)
        if not len(absent):
            return state
        place = absent % count
        reach = 1 + int(random.integers(1, 2 + len(absent) // int(random.choice([4, 8, 16, 32]))))
        order = np.argsort(np.abs(place - place[random.integers(len(absent))]), kind="stable")[:reach]
        chosen = absent[order[random.random(len(order)) < random.choice([0.3, 0.6, 1.0])]]
        windows[chosen] = NONE
        self.guesses.clear()
        down = self.descend(State(0, 0.0, windows), limit)
        return self.refill(down, limit) if down.peak_bytes <= limit else down
