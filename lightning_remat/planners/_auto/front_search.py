"""Builds the whole trade-off of a graph once; every budget is then a look-up, so more budget is never slower."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain

import numpy as np

from ...schedules.compiled import Small
from ...schedules.compiled_simulator import Judge
from ...schedules.floor import find_floor
from ...schedules.graph import Graph
from ...schedules.time_bound import TimeBound
from .._candidates import Candidate
from .._progress import SearchProgress
from . import constants
from .front import Front
from .local_search import Search, State
from .portfolio import deep_candidates, rival_candidates
from .position_program import Program
from .pricing import is_priced, priced_front
from .window_simulator import pack
from .windows import windows_between, windows_of


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
    is_start = like is not None and like != graph and _are_alike(like, graph)
    return _front(graph, effort, like if is_start else None)


@lru_cache(maxsize=constants.MAX_FRONTS)
def _front(graph: Graph, effort: float, like: Graph | None) -> Front:
    return _search(graph, effort, None if like is None else _front(like, effort, None))


def _are_alike(one: Graph, other: Graph) -> bool:
    """Whether the windows of one graph describe schedules of the other too."""

    def structure(graph: Graph) -> tuple[object, ...]:
        nodes = ((n.name, n.inputs, n.saved, n.storage_of, n.tape_bytes > 0) for n in graph.nodes)
        return (graph.outputs, *nodes)

    return len(one.nodes) == len(other.nodes) and structure(one) == structure(other)


def _search(graph: Graph, effort: float, relative: Front | None) -> Front:
    with SearchProgress(f"planning {len(graph.nodes)} operations") as progress:
        builder = FrontBuilder(graph, progress, effort * (constants.SHARE_AFTER_A_RELATIVE if relative else 1.0))
        builder.meet_rivals()
        if builder.is_deep:
            builder.meet_deep_rivals()
        if relative:
            builder.meet_relative(relative)
        builder.find_lowest()
        builder.press()
        builder.sweep()
        if len(graph.nodes) > constants.DEEPER_NODES:
            builder.bridge()
        builder.polish()
    return builder.priced_front()


def _share(num_nodes: int) -> float:
    """Of the usual effort, what a graph of so many nodes gets."""
    if num_nodes <= constants.DEEP_NODES:
        return 1.0
    return constants.DEEP_SHARE if num_nodes <= constants.DEEPER_NODES else (num_nodes / constants.DEEPER_NODES) ** 2


class FrontBuilder:
    """The parts of the search, which share the front, the effort and a watcher.

    What stretches of recomputations and hooks cost no window tells: states are found by the prices of single runs, and
    chosen from by what they cost with all.
    """

    def __init__(self, graph: Graph, progress: SearchProgress, effort: float = 1.0) -> None:
        self.priced_graph, graph = graph, graph.with_prices_of_runs()
        self.graph, self.problem, self.progress = graph, pack(graph), progress
        self.front, self.priced = Front(graph, self.problem), Front(self.priced_graph, self.problem)
        self.is_deep = len(graph.nodes) > constants.DEEP_NODES
        self.last = int(effort * _share(len(graph.nodes)) * constants.ACTIONS_PER_EFFORT)
        self.search = Search(self.problem, self.front.offer, max(1, int(self.last * constants.WALK_SHARE)))
        self.random = np.random.default_rng(0)
        self.plain = self.search.plain()
        self.bound, self.time_bound = find_floor(graph).bytes, TimeBound(graph, constants.SEED_COLUMNS)
        self.programs = [
            Program(graph, self.problem, self.plain.peak_bytes, blocks) for blocks in constants.PROGRAM_BLOCKS
        ]

    def meet_rivals(self) -> None:
        """Takes in what other planners answer, so that none of those is faster or lower at any budget."""
        self._meet(rival_candidates(self.priced_graph))

    def meet_deep_rivals(self) -> None:
        """The same of the planners for long chains."""
        self._meet(deep_candidates(self.priced_graph))

    def _meet(self, candidates: Iterable[Candidate]) -> None:
        judge = Judge(self.graph)
        for number, (peak, seconds, schedule) in enumerate(candidates):
            self.progress.update(1 - 1 / (1 + number / 100), "other planners")
            if self.priced_graph is not self.graph:
                self.priced.offer_recipe(peak, seconds, schedule)
                seconds = judge.cost(schedule).seconds
            if self._is_news(peak, seconds):
                self.search.replay(windows_of(self.graph, self.problem, schedule))
                if self._is_news(peak, seconds):
                    self.front.offer_recipe(peak, seconds, schedule)

    def priced_front(self) -> Front:
        """What was found, with stretches, tapes and hooks priced as in what is answered."""
        if not is_priced(self.priced_graph):
            return self.front
        return priced_front(self.priced_graph, [self.priced, self.front])

    def meet_relative(self, relative: Front) -> None:
        """Takes in what the same operations led to at other costs."""
        for index in range(len(relative.peaks)):
            self.search.replay(relative.windows(index))

    def _is_news(self, peak: int, seconds: float) -> bool:
        known = self.front.within(peak)
        return known is None or seconds < self.front.seconds[known] * (1 - constants.ROUNDING)

    def find_lowest(self) -> None:
        """Goes down from plain autograd in steps, and from the dynamic programs, until nothing gets lower."""
        span = self.plain.peak_bytes - self.bound
        num_levels = constants.NUM_FIRST_LEVELS
        if self.front.peaks[0] <= self.bound:
            num_levels //= 2
        walked, led = constants.WALKED_SHARE * self.last, constants.LED_SHARE * self.last
        state = self.plain
        for k in range(num_levels - 1, -1, -1):
            limit = self.bound + span * k // num_levels
            if self.front.peaks[0] <= limit and self.search.num_actions > walked * (1 - (k + 0.5) / num_levels):
                continue  # a rival is there already, and the levels above took more than their share
            self.progress.update(1 - k / num_levels, "the lowest peak")
            if self.search.num_actions < walked:
                state = self._step_down(state, limit, constants.SEED_SHARE * walked * (1 - k / num_levels))
                if self.front.peaks[0] > limit:
                    break
            elif self.search.num_actions < led:
                # Too large a graph to walk down: from here on the programs lead.
                for seed in self._seeds(limit):
                    self._settle(seed, limit)
        low, high = self.bound, self.front.peaks[0]
        for _ in range(constants.NUM_HALVINGS):
            limit = (low + high) // 2
            for seed in [self._best(high), *self._seeds(high, most=constants.MANY_SEEDS)]:
                if self._settle(seed, limit, probes=constants.MANY_PROBES).peak_bytes <= limit:
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
        last = self.search.num_actions + self.last // constants.PRESS_PART
        idle = 0
        while self.search.num_actions < last and idle < constants.MAX_IDLE_KICKS:
            before = self.front.peaks[0], self.front.seconds[0]
            self.progress.update(1 - (last - self.search.num_actions) / self.last, "the lowest peak")
            self.search.kick(self._best(self.front.peaks[0]), self.front.peaks[0], self.random)
            idle = 0 if before != (self.front.peaks[0], self.front.seconds[0]) else idle + 1

    def levels(self) -> list[int]:
        """The budgets to work at, from the highest to the lowest."""
        low, high = self.front.peaks[0], self.plain.peak_bytes
        return [low + (high - low) * k // constants.NUM_LEVELS for k in range(constants.NUM_LEVELS - 1, -1, -1)]

    def sweep(self) -> None:
        """Down the levels, each from its neighbour and from the best known: first every third, and seeds; then up."""
        levels = self.levels()
        thirds = [levels[2::3], levels[0::3], levels[1::3]]
        for number, chosen in enumerate(thirds):
            state, first = self.plain, self.search.num_actions
            left = (constants.LATER_SWEEPS_SHARE if number else 1.0) * self.last - first
            for k, limit in enumerate(chosen):
                if self.search.num_actions > first + left * (k + 0.5) / len(chosen):
                    continue  # the levels above took more than their share
                self.progress.update((number + k / len(chosen)) / 3, "budget by budget")
                most = 0.0 if number else first + constants.SEED_SHARE * left * (k + 1) / len(chosen)
                state = self._step_down(self._best(state.peak_bytes), limit, most, relaxed=True)
        for limit in reversed(levels):
            if self.search.num_actions > constants.OVERTIME * self.last:
                break
            self.search.refill(self._best(limit), limit)

    def bridge(self) -> None:
        """Down from two levels above the lowest peak in small steps: one of a level is too large for the search."""
        last = self.search.num_actions + int(constants.BRIDGE_SHARE * self.last)
        low, above = self.levels()[-1], self.levels()[-3]
        state = self._best(above)
        for k in range(1, constants.BRIDGE_STEPS + 1):
            limit = above - (above - low) * k // constants.BRIDGE_STEPS
            self.progress.update(k / constants.BRIDGE_STEPS, "near the lowest peak")
            state = self._settle(state, limit, probes=constants.PROBES)
            if state.peak_bytes > limit or self.search.num_actions > last:
                break

    def polish(self) -> None:
        """Exchanges and kicks at every level in turn until the effort is spent or some rounds have found nothing."""
        exchanged = {limit: self._exchange(limit) for limit in reversed(self.levels())}
        last = max(self.last, self.search.num_actions + self.last // constants.POLISH_PART)
        idle_rounds = 0
        while self.search.num_actions < last and idle_rounds < constants.MAX_IDLE_ROUNDS:
            before = list(self.front.seconds), list(self.front.peaks)
            for limit in (*self.levels(), *[self.front.peaks[0]] * constants.KICKS_AT_LOWEST):
                self.progress.update(self.search.num_actions / last, "improving")
                self.search.kick(self._best(limit), limit, self.random)
                if self._best(limit).seconds != exchanged.get(limit):
                    exchanged[limit] = self._exchange(limit)
                if self.search.num_actions >= last:
                    break
            idle_rounds = 0 if before != (self.front.seconds, self.front.peaks) else idle_rounds + 1

    def _exchange(self, limit: int) -> float:
        """Exchanges from the best known at a level; its seconds after that."""
        return self.search.exchange(self._best(limit), limit).seconds

    def _step_down(self, state: State, limit: int, most: float, *, relaxed: bool = False) -> State:
        """From `state`, and from the programs while fewer than `most` actions are replayed in all, to `limit`.

        Returns:
            The fastest known there, or how far down `state` led.
        """
        down = self._settle(state, limit, probes=constants.PROBES)
        if self.search.num_actions < most:
            for seed in self._seeds(limit, relaxed=relaxed):
                self._settle(seed, limit, probes=constants.PROBES)
        return down if self.front.within(limit) is None else self._best(limit)

    def _settle(self, state: State, limit: int, probes: int = 0) -> State:
        down = self.search.descend(state, limit, probes=probes)
        return self.search.refill(down, limit) if down.peak_bytes <= limit else down

    def _best(self, limit: int) -> State:
        index = self.front.within(limit)
        assert index is not None, "no level lies below the lowest peak"
        return State(self.front.peaks[index], self.front.seconds[index], self.front.windows(index))

    def _seeds(self, limit: int, most: int = constants.FEW_SEEDS, *, relaxed: bool = False) -> list[State]:
        """The programs' answers near the limit that may beat the best known after a local search."""
        known = self.front.within(limit)
        overhead = np.inf if known is None else self.front.seconds[known] - self.plain.seconds
        room = limit - self.problem.fixed_bytes
        ranked: list[tuple[float, State]] = []
        answers = chain(self._programmed(room), self._relaxed(room) if relaxed else ())
        for windows in answers:
            peak, seconds, num_actions = self.search.replay(windows)
            above = max(0.0, (peak - limit) / max(1, room))
            added = seconds - self.plain.seconds
            if num_actions and above < constants.MOST_ABOVE and added < constants.MOST_OVERHEAD * overhead:
                ranked.append((added * (1 + constants.PRICE_OF_ABOVE * above), State(peak, seconds, windows)))
        ranked.sort(key=lambda pair: pair[0])
        return [state for _, state in ranked[:most]]

    def _programmed(self, room: int) -> Iterator[Small]:
        """What the dynamic programs hold when all but the fixed bytes has about that much room."""
        for program in self.programs:
            answers = [program.windows(self.problem.fixed_bytes + int(room * share)) for share in constants.ROOM_SHARES]
            yield from {id(windows): windows for windows in answers if windows is not None}.values()

    def _relaxed(self, room: int) -> Iterator[Small]:
        """What the linear program keeps then."""
        relaxed = self.time_bound.relax(self.problem.fixed_bytes + room)
        if np.isfinite(relaxed.seconds):
            for least in constants.ROUNDED_FROM:
                outputs, tapes = relaxed.outputs >= least, relaxed.tapes >= least
                yield windows_between(self.graph, self.problem, outputs, tapes, len(self.graph.nodes))
