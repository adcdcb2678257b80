"""Builds the whole trade-off of a graph once; every budget is then a look-up, so more budget is never slower."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain

import numpy as np

from ...schedules.compiled import Small
from ...schedules.floor import find_floor
from ...schedules.graph import Graph
from ...schedules.time_bound import TimeBound
from .._candidates import Candidate
from .._progress import SearchProgress
from .front import Front
from .local_search import Search, State
from .portfolio import deep_candidates, rival_candidates
from .position_program import Program
from .window_simulator import pack
from .windows import windows_between, windows_of

NUM_LEVELS = 57
"""Budgets between floor and plain peak at which the search works; a multiple of 19, for tables of 20 budgets."""

NUM_FIRST_LEVELS = 20
"""On the way down from plain autograd; half as many where a rival has reached the bound."""

ACTIONS_PER_EFFORT = 70_000_000
"""Replayed actions of a search with effort 1: some five seconds."""

DEEP_NODES = 700
"""In larger graphs the lowest peaks are out of reach of the local search, and planners for long chains help."""

DEEP_SHARE = 0.4
"""Share of the search then: what those planners answer need not be found."""

DEEPER_NODES = 1500
"""Beyond, the share grows with the square of the nodes, and the lowest two levels are searched in smaller steps."""

BRIDGE_STEPS = 16

BRIDGE_SHARE = 0.6
"""Of the effort, for those steps."""

SEED_COLUMNS = 3000
"""Of the linear programs that seeds come from: larger ones take seconds and lead no further."""

SEED_SHARE = 0.5
"""Of the effort for a way down, level by level; past it each is searched from its neighbour only."""

MAX_IDLE_ROUNDS = 6

MAX_IDLE_KICKS = 40

WALK_SHARE = 0.05
"""Of the effort, for one walk down to a limit or one filling up of what it leaves free."""

WALKED_SHARE = 0.3
"""Of the effort, for walking down from plain autograd to the lowest peak; past it the dynamic programs lead on."""

LED_SHARE = 0.5
"""Of the effort, for both."""

NUM_HALVINGS = 7
"""Of what lies between the bound and the lowest peak known, to find a lower one."""

PRESS_PART = 6
"""One part in so many of the effort goes into kicks of the lowest states."""

LATER_SWEEPS_SHARE = 0.85
"""Of the effort, at which the second and third sweep over the levels end: the rest polishes."""

OVERTIME = 1.1
"""Of the effort, at which the sweep up again ends."""

POLISH_PART = 8
"""One part in so many of the effort goes at least into polishing, whatever is spent by then."""

KICKS_AT_LOWEST = 3
"""For each kick at any other level: nobody else looks for states there."""

PROBES, MANY_PROBES = 4, 12
"""Drops that a walk down tries at each step; many, where it looks for a lower peak than any known."""

FEW_SEEDS, MANY_SEEDS = 2, 4
"""States from the programs that a walk starts from; many, where it looks for a lower peak than any known."""

PROGRAM_BLOCKS = (16, 40, 100)
"""Into how many blocks of nodes the dynamic programs cut the graph: coarse ones see far, fine ones see all."""

ROOM_SHARES = (1.08, 1.0, 0.93, 0.85)
"""Of the room at a limit that a dynamic program is asked for: what it counts is not quite the true peak."""

ROUNDED_FROM = (0.2, 0.5, 0.8)
"""How much of a value the linear program must hold for the seed to hold it."""

MOST_ABOVE, MOST_OVERHEAD = 0.2, 2.5
"""A seed further above the limit (of the room), or of more overhead (of the best known), is not walked down from."""

PRICE_OF_ABOVE = 5
"""What a seed's way down to the limit is taken to cost: overhead times so much of the room."""

ROUNDING = 1e-9
"""Sums of the same seconds in another order differ by less, relatively."""


SHARE_AFTER_A_RELATIVE = 0.3
"""Of the search that is left to do from the states of a graph with the same operations."""

MAX_FRONTS = 8


@lru_cache(maxsize=MAX_FRONTS)
def front_of(graph: Graph, effort: float = 1.0, like: Graph | None = None) -> Front:
    """All the trade-offs found between plain autograd and the lowest peak.

    The last few are kept, so that repeated budgets are look-ups. The effort is counted in replayed actions, not in
    time, and nothing else is remembered: the same arguments give the same front, whatever was planned before.

    Args:
        graph: The operations.
        effort: Multiple of the usual search.
        like: The same operations at other costs (another batch size). What their search led to is where this one
            starts, which shortens it; their front is found first, if it is not at hand. Other operations are ignored.
    """
    if like is None or like == graph or not _are_alike(like, graph):
        return _search(graph, effort, None)
    return _search(graph, effort, front_of(like, effort))


def _are_alike(one: Graph, other: Graph) -> bool:
    """Whether the windows of one graph describe schedules of the other too."""

    def structure(graph: Graph) -> tuple[object, ...]:
        nodes = ((n.name, n.inputs, n.saved, n.storage_of, n.tape_bytes > 0) for n in graph.nodes)
        return (graph.outputs, *nodes)

    return len(one.nodes) == len(other.nodes) and structure(one) == structure(other)


def _search(graph: Graph, effort: float, relative: Front | None) -> Front:
    with SearchProgress(f"planning {len(graph.nodes)} operations") as progress:
        builder = FrontBuilder(graph, progress, effort * (SHARE_AFTER_A_RELATIVE if relative else 1.0))
        builder.meet_rivals()
        if builder.is_deep:
            builder.meet_deep_rivals()
        if relative:
            builder.meet_relative(relative)
        builder.find_lowest()
        builder.press()
        builder.sweep()
        if len(graph.nodes) > DEEPER_NODES:
            builder.bridge()
        builder.polish()
    return builder.front


def _share(num_nodes: int) -> float:
    """Of the usual effort, what a graph of so many nodes gets."""
    if num_nodes <= DEEP_NODES:
        return 1.0
    return DEEP_SHARE if num_nodes <= DEEPER_NODES else (num_nodes / DEEPER_NODES) ** 2


class FrontBuilder:
    """The parts of the search, which share the front, the effort and a watcher."""

    def __init__(self, graph: Graph, progress: SearchProgress, effort: float = 1.0) -> None:
        self.graph, self.problem, self.progress = graph, pack(graph), progress
        self.front = Front(graph, self.problem)
        self.is_deep = len(graph.nodes) > DEEP_NODES
        self.last = int(effort * _share(len(graph.nodes)) * ACTIONS_PER_EFFORT)
        self.search = Search(self.problem, self.front.offer, max(1, int(self.last * WALK_SHARE)))
        self.random = np.random.default_rng(0)
        self.plain = self.search.plain()
        self.bound, self.time_bound = find_floor(graph).bytes, TimeBound(graph, SEED_COLUMNS)
        self.programs = [Program(graph, self.problem, self.plain.peak_bytes, blocks) for blocks in PROGRAM_BLOCKS]

    def meet_rivals(self) -> None:
        """Takes in what other planners answer, so that none of those is faster or lower at any budget."""
        self._meet(rival_candidates(self.graph))

    def meet_deep_rivals(self) -> None:
        """The same of the planners for long chains."""
        self._meet(deep_candidates(self.graph))

    def _meet(self, candidates: Iterable[Candidate]) -> None:
        for number, (peak, seconds, schedule) in enumerate(candidates):
            self._tell(1 - 1 / (1 + number / 100), "other planners")
            if self._is_news(peak, seconds):
                self.search.replay(windows_of(self.graph, self.problem, schedule))
                if self._is_news(peak, seconds):
                    self.front.offer_schedule(peak, seconds, schedule)

    def meet_relative(self, relative: Front) -> None:
        """Takes in what the same operations led to at other costs."""
        for index in range(len(relative.peaks)):
            self.search.replay(relative.windows(index))

    def _is_news(self, peak: int, seconds: float) -> bool:
        known = self.front.within(peak)
        return known is None or seconds < self.front.seconds[known] * (1 - ROUNDING)

    def find_lowest(self) -> None:
        """Goes down from plain autograd in steps, and from the dynamic programs, until nothing gets lower."""
        span = self.plain.peak_bytes - self.bound
        num_levels = NUM_FIRST_LEVELS
        if self.front.peaks[0] <= self.bound:
            num_levels //= 2
        walked, led = WALKED_SHARE * self.last, LED_SHARE * self.last
        state = self.plain
        for k in range(num_levels - 1, -1, -1):
            limit = self.bound + span * k // num_levels
            if self.front.peaks[0] <= limit and self.search.num_actions > walked * (1 - (k + 0.5) / num_levels):
                continue  # a rival is there already, and the levels above took more than their share
            self._tell(1 - k / num_levels, "the lowest peak")
            if self.search.num_actions < walked:
                state = self._step_down(state, limit, SEED_SHARE * walked * (1 - k / num_levels))
                if self.front.peaks[0] > limit:
                    break
            elif self.search.num_actions < led:
                # Too large a graph to walk down: from here on the programs lead.
                for seed in self._seeds(limit):
                    self._settle(seed, limit)
        low, high = self.bound, self.front.peaks[0]
        for _ in range(NUM_HALVINGS):
            limit = (low + high) // 2
            for seed in [self._best(high), *self._seeds(high, most=MANY_SEEDS)]:
                if self._settle(seed, limit, probes=MANY_PROBES).peak_bytes <= limit:
                    break
                if self.search.num_actions > led:
                    break
            if self.front.peaks[0] <= limit:
                high = self.front.peaks[0]
            else:
                low = limit
            if low >= high or self.search.num_actions > led:
                break

    def press(self) -> None:
        """Kicks the lowest states until many in a row have made none lower or faster."""
        last = self.search.num_actions + self.last // PRESS_PART
        idle = 0
        while self.search.num_actions < last and idle < MAX_IDLE_KICKS:
            before = self.front.peaks[0], self.front.seconds[0]
            self._tell(1 - (last - self.search.num_actions) / self.last, "the lowest peak")
            self.search.kick(self._best(self.front.peaks[0]), self.front.peaks[0], self.random)
            idle = 0 if before != (self.front.peaks[0], self.front.seconds[0]) else idle + 1

    def levels(self) -> list[int]:
        """The budgets to work at, from the highest to the lowest."""
        low, high = self.front.peaks[0], self.plain.peak_bytes
        return [low + (high - low) * k // NUM_LEVELS for k in range(NUM_LEVELS - 1, -1, -1)]

    def sweep(self) -> None:
        """Down the levels, each from its neighbour and from the best known: first every third, and seeds; then up."""
        levels = self.levels()
        thirds = [levels[2::3], levels[0::3], levels[1::3]]
        for number, chosen in enumerate(thirds):
            state, first = self.plain, self.search.num_actions
            left = (LATER_SWEEPS_SHARE if number else 1.0) * self.last - first
            for k, limit in enumerate(chosen):
                if self.search.num_actions > first + left * (k + 0.5) / len(chosen):
                    continue  # the levels above took more than their share
                self._tell((number + k / len(chosen)) / 3, "budget by budget")
                most = 0.0 if number else first + SEED_SHARE * left * (k + 1) / len(chosen)
                state = self._step_down(self._best(state.peak_bytes), limit, most, relaxed=True)
        for limit in reversed(levels):
            if self.search.num_actions > OVERTIME * self.last:
                break
            self.search.refill(self._best(limit), limit)

    def bridge(self) -> None:
        """Down from two levels above the lowest peak in small steps: one of a level is too large for the search."""
        last = self.search.num_actions + int(BRIDGE_SHARE * self.last)
        low, above = self.levels()[-1], self.levels()[-3]
        state = self._best(above)
        for k in range(1, BRIDGE_STEPS + 1):
            limit = above - (above - low) * k // BRIDGE_STEPS
            self._tell(k / BRIDGE_STEPS, "near the lowest peak")
            state = self._settle(state, limit, probes=PROBES)
            if state.peak_bytes > limit or self.search.num_actions > last:
                break

    def polish(self) -> None:
        """Exchanges and kicks at every level in turn until the effort is spent or some rounds have found nothing."""
        exchanged = {limit: self._exchange(limit) for limit in reversed(self.levels())}
        last = max(self.last, self.search.num_actions + self.last // POLISH_PART)
        idle_rounds = 0
        while self.search.num_actions < last and idle_rounds < MAX_IDLE_ROUNDS:
            before = list(self.front.seconds), list(self.front.peaks)
            for limit in (*self.levels(), *[self.front.peaks[0]] * KICKS_AT_LOWEST):
                self._tell(self.search.num_actions / last, "improving")
                self.search.kick(self._best(limit), limit, self.random)
                if self._best(limit).seconds != exchanged.get(limit):
                    exchanged[limit] = self._exchange(limit)
                if self.search.num_actions >= last:
                    break
            idle_rounds = 0 if before != (self.front.seconds, self.front.peaks) else idle_rounds + 1

    def _exchange(self, limit: int) -> float:
        """Exchanges from the best known at a level; its seconds after that."""
        return self.search.exchange(self._best(limit), limit).seconds

    def _tell(self, fraction: float, stage: str) -> None:
        self.progress.update(fraction, stage)

    def _step_down(self, state: State, limit: int, most: float, *, relaxed: bool = False) -> State:
        """From `state`, and from the programs while fewer than `most` actions are replayed in all, to `limit`.

        Returns:
            The fastest known there, or how far down `state` led.
        """
        down = self._settle(state, limit, probes=PROBES)
        if self.search.num_actions < most:
            for seed in self._seeds(limit, relaxed=relaxed):
                self._settle(seed, limit, probes=PROBES)
        return down if self.front.within(limit) is None else self._best(limit)

    def _settle(self, state: State, limit: int, probes: int = 0) -> State:
        down = self.search.descend(state, limit, probes=probes)
        return self.search.refill(down, limit) if down.peak_bytes <= limit else down

    def _best(self, limit: int) -> State:
        index = self.front.within(limit)
        assert index is not None, "no level lies below the lowest peak"
        return State(self.front.peaks[index], self.front.seconds[index], self.front.windows(index))

    def _seeds(self, limit: int, most: int = FEW_SEEDS, *, relaxed: bool = False) -> list[State]:
        """The programs' answers near the limit that may beat the best known after a local search."""
        known = self.front.within(limit)
        overhead = np.inf if known is None else self.front.seconds[known] - self.plain.seconds
        room = limit - self.problem.fixed_bytes
        ranked: list[tuple[float, State]] = []
        answers = chain(self._programmed(room), self._relaxed(room) if relaxed else ())
        for windows in answers:
            peak, seconds, num_actions = self.search.replay(windows)
            above = max(0.0, (peak - limit) / max(1, room))
            if num_actions and above < MOST_ABOVE and seconds - self.plain.seconds < MOST_OVERHEAD * overhead:
                ranked.append(
                    ((seconds - self.plain.seconds) * (1 + PRICE_OF_ABOVE * above), State(peak, seconds, windows))
                )
        ranked.sort(key=lambda pair: pair[0])
        return [state for _, state in ranked[:most]]

    def _programmed(self, room: int) -> Iterator[Small]:
        """What the dynamic programs hold when all but the fixed bytes has about that much room."""
        for program in self.programs:
            answers = [program.windows(self.problem.fixed_bytes + int(room * share)) for share in ROOM_SHARES]
            yield from {id(windows): windows for windows in answers if windows is not None}.values()

    def _relaxed(self, room: int) -> Iterator[Small]:
        """What the linear program keeps then."""
        relaxed = self.time_bound.relax(self.problem.fixed_bytes + room)
        if np.isfinite(relaxed.seconds):
            for least in ROUNDED_FROM:
                outputs, tapes = relaxed.outputs >= least, relaxed.tapes >= least
                yield windows_between(self.graph, self.problem, outputs, tapes, len(self.graph.nodes))
