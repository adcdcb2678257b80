"""Several regions under one budget: for each some schedules, of which the cheapest set that fits is chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..schedules.compiled import Flags, Floats, Ints
from ..schedules.graph import Graph, Node, fields_in
from .region_options import Asking, Option, Planner, options_of, owning_nothing
from .step_memory import RegionPeaks, StepPeaks, Surroundings

_MOST_STEPS_DOWN = 16
"""Budgets that are tried, each a byte below the lowest peak so far."""

_LOWERED = 4
"""Regions of which it is asked for the lowest peak of the step, where that is wanted."""


def choose(
    keys: Sequence[str],
    ways: Mapping[str, Sequence[Graph]],
    budget_bytes: int,
    planner: Planner,
    surroundings: Surroundings,
    *,
    like: Mapping[Graph, Graph],
    **options: Any,
) -> tuple[dict[str, Option], Surroundings]:
    """An option for each region, such that the step stays within the budget where that is possible.

    Starting from the plain run, the exchange that saves the most excess memory for its seconds is made until the step
    fits; what was exchanged in vain is taken back, and the planner is asked once more for each region, with just what
    the others leave. Where it does not come to fit, the lowest peak is returned. To reshard a unit after its forward,
    where that is to be planned, is one more exchange, for the seconds of a gather; so that this is never worse than
    resharding all or none, each of these is a start too.

    Args:
        keys: The regions' names in the order of their calls.
        ways: Region name → its operations, in each of the ways in which they may run.
        budget_bytes: What the step must not exceed.
        planner: A name of `PLANNERS` or a function.
        surroundings: What is alive beside the regions.
        like: Operations at this batch size → those at another one, which the planner may start from.
        **options: Passed to the planner.

    Returns:
        The options, and the surroundings with the units as chosen.
    """
    known: dict[Graph, Graph] = {}
    passing: dict[str, int] = {}  # of the call into which the most comes
    for key, size in zip(keys, surroundings.handed_on.passing(len(keys)), strict=True):
        passing[key] = max(size, passing.get(key, 0))
    awaited = {key for k, key in enumerate(keys) if k not in surroundings.over}
    asked = tuple(sorted(options.items()))

    def asking(graph: Graph) -> Asking:
        own = owning_nothing(graph)
        alike = known.setdefault(_without_seconds(own), own)  # repeated blocks are planned once
        start = owning_nothing(like[graph]) if graph in like else alike
        return Asking(alike, planner, surroundings.keeps_gradients, asked, start)

    def of_region(key: str, graph: Graph, option: Option) -> Option:
        peaks = option.peaks.reading(passing[key], recomputes=option.schedule.recomputes)
        return replace(option, graph=graph, peaks=peaks if key in awaited else peaks.of_forward)

    def menu(key: str, graph: Graph) -> list[Option]:
        return [of_region(key, graph, option) for option in options_of(asking(graph))]

    def answer(key: str, peak_bytes: int, held_bytes: int) -> Option | None:
        rest_bytes, own_bytes = max(0, peak_bytes - held_bytes), max(1, peak_bytes - passing[key])
        found = ((graph, asking(graph).answer(own_bytes, rest_bytes)) for graph in ways[key])
        told = [of_region(key, graph, option) for graph, option in found if option is not None]
        return min(told, key=lambda option: option.seconds, default=None)

    menus = {key: [option for graph in graphs for option in menu(key, graph)] for key, graphs in ways.items()}
    search = _Search([(key, ways[key][0]) for key in keys], menus, surroundings)
    units = frozenset(search.prices)
    starts = [(units, True)]
    if units:
        starts += [(units, False), (frozenset[int](), False)]
    found = [search.relaxed(search.reduced(budget_bytes, *start), budget_bytes) for start in starts]
    if all(search.excess(choice, budget_bytes) for choice in found):
        lowest = search.lowered(search.lowest(starts), answer)
        found = [search.relaxed(lowest, search.peak(lowest))]
    best = min(found, key=lambda choice: (search.excess(choice, budget_bytes), search.seconds(choice)))
    best = search.refined(best, budget_bytes, answer)
    return best.options, search.around(best.kept)


@dataclass(frozen=True, slots=True)
class Choice:
    """An option for each region, and the units that stay gathered, of those that are planned."""

    options: dict[str, Option]
    kept: frozenset[int]


class _Search:
    """Exchanges one option of one region, or one unit's resharding, at a time.

    All exchanges of options are tried at once, as rows of arrays whose columns are the calls of the step.
    """

    def __init__(
        self, calls: Sequence[tuple[str, Graph]], menus: Mapping[str, Sequence[Option]], surroundings: Surroundings
    ) -> None:
        keys = [key for key, _ in calls]
        self.keys, self.menus, self.surroundings = keys, menus, surroundings
        self._calls = calls
        self._peaks: dict[frozenset[int], StepPeaks] = {}
        self._exchanges = [(key, option) for key, menu in menus.items() for option in menu]
        self._is_exchanged: Flags = np.array([[call == key for call in keys] for key, _ in self._exchanges])
        self._exchanged: Ints = _figures([option for _, option in self._exchanges])[:, :, None]
        self._seconds: Floats = np.array([option.seconds for _, option in self._exchanges])

    @property
    def prices(self) -> dict[int, float]:
        """The units to plan, and the seconds of their second gather."""
        return {} if self.surroundings.gathering is None else self.surroundings.gathering.planned

    def around(self, kept: frozenset[int]) -> Surroundings:
        gathering = self.surroundings.gathering
        return self.surroundings if gathering is None else replace(self.surroundings, gathering=gathering.keeping(kept))

    def _peaks_with(self, kept: frozenset[int]) -> StepPeaks:
        if kept not in self._peaks:
            self._peaks[kept] = StepPeaks(self._calls, self.around(kept))
        return self._peaks[kept]

    def _figures_of(self, choice: Choice) -> Ints:
        return _figures([choice.options[key] for key in self.keys])

    def peak(self, choice: Choice) -> int:
        return int(self._peaks_with(choice.kept).of(*self._figures_of(choice)).max())

    def excess(self, choice: Choice, budget_bytes: int) -> int:
        return int(_excess(self._peaks_with(choice.kept).of(*self._figures_of(choice)), budget_bytes))

    def seconds(self, choice: Choice) -> float:
        gathers = sum(price for u, price in self.prices.items() if u not in choice.kept)
        return gathers + sum(choice.options[key].seconds for key in self.keys)

    def lowest(self, starts: Sequence[tuple[frozenset[int], bool]]) -> Choice:
        """That of the lowest peak that is found, of the options that are there.

        Args:
            starts: What `reduced` is to begin with.
        """
        found = [self.reduced(0, *start) for start in starts]
        leanest = self._least(lambda p: p.held_bytes), self._least(lambda p: p.most_bytes)
        units = frozenset(self.prices)
        found += [Choice(lean, kept) for lean in leanest for kept in {units, frozenset[int]()}]
        best = min(found, key=self.peak)
        for _ in range(_MOST_STEPS_DOWN):
            lower = min((self.reduced(self.peak(best) - 1, *start) for start in starts), key=self.peak)
            if self.peak(lower) >= self.peak(best):
                break
            best = lower
        return best

    def _least(self, measure: Callable[[RegionPeaks], int]) -> dict[str, Option]:
        return {key: min(menu, key=lambda o: (measure(o.peaks), o.seconds)) for key, menu in self.menus.items()}

    def reduced(self, budget_bytes: int, kept: frozenset[int], reshards: bool) -> Choice:
        """From the fastest options on, what excess memory is exchanged for seconds, by resharding too where wanted."""
        fastest = {key: min(menu, key=lambda o: o.seconds) for key, menu in self.menus.items()}
        choice = Choice(fastest, kept)
        excess = self.excess(choice, budget_bytes)
        while excess:
            left, seconds = self._after_exchanges(choice, budget_bytes)
            units = sorted(choice.kept) if reshards else []
            figures = self._figures_of(choice)
            resharded = [_excess(self._peaks_with(choice.kept - {u}).of(*figures), budget_bytes) for u in units]
            left = np.append(left, resharded)
            seconds = np.append(seconds, [self.prices[u] for u in units])
            best = int(np.argmax(np.where(left < excess, (excess - left) / np.maximum(seconds, 1e-12), -1.0)))
            if left[best] >= excess:
                break
            excess = int(left[best])
            if best < len(self._exchanges):
                key, option = self._exchanges[best]
                choice = Choice({**choice.options, key: option}, choice.kept)
            else:
                choice = Choice(choice.options, choice.kept - {units[best - len(self._exchanges)]})
        return choice

    def _after_exchanges(self, choice: Choice, budget_bytes: int) -> tuple[Ints, Floats]:
        """What exceeds the budget after each exchange of an option, and the seconds that it costs."""
        figures = zip(self._exchanged, self._figures_of(choice), strict=True)
        own: list[Ints] = [np.where(self._is_exchanged, exchanged, now) for exchanged, now in figures]
        left = _excess(self._peaks_with(choice.kept).of(*own), budget_bytes)
        return left, self._seconds - np.array([choice.options[key].seconds for key, _ in self._exchanges])

    def relaxed(self, choice: Choice, budget_bytes: int) -> Choice:
        """The same with faster options, and fewer gathers, where these do not exceed the budget by more."""
        excess = self.excess(choice, budget_bytes)
        for key, menu in self.menus.items():
            for option in sorted(menu, key=lambda o: o.seconds):
                if option.seconds >= choice.options[key].seconds:
                    break
                faster = Choice({**choice.options, key: option}, choice.kept)
                if self.excess(faster, budget_bytes) <= excess:
                    choice = faster
                    break
        for u in sorted(self.prices.keys() - choice.kept, key=lambda u: -self.prices[u]):
            fewer = Choice(choice.options, choice.kept | {u})
            if self.excess(fewer, budget_bytes) <= excess:
                choice = fewer
        return choice

    def refined(self, choice: Choice, budget_bytes: int, ask: Callable[[str, int, int], Option | None]) -> Choice:
        """The same with faster schedules of regions, one by one, where these use what the others leave.

        Args:
            choice: What to start from; left as it is where it exceeds the budget.
            budget_bytes: What the step must not exceed.
            ask: Answers a region, the most that it may need by itself, and the most that it may hold.
        """
        if self.excess(choice, budget_bytes):
            return choice
        fastest = {key: min(option.seconds for option in menu) for key, menu in self.menus.items()}
        slowest = sorted(self.menus, key=lambda key: fastest[key] - choice.options[key].seconds)
        for key in slowest:
            if choice.options[key].seconds == fastest[key] or self.keys.count(key) > 1:
                continue  # of several calls' limits none is that of one schedule
            option = ask(key, *self._room(key, choice, budget_bytes))
            if option is not None and option.seconds < choice.options[key].seconds:
                faster = Choice({**choice.options, key: option}, choice.kept)
                if not self.excess(faster, budget_bytes):
                    choice = faster
        return choice

    def lowered(self, choice: Choice, ask: Callable[[str, int, int], Option | None]) -> Choice:
        """The same with schedules of the regions that matter most for its peak, the best of which the planner knows.

        Each is asked for the lowest peak of the step where the others are as they are: that of the region itself, or
        what it holds with what the others need then.

        Args:
            choice: What to start from.
            ask: See `refined`.
        """
        single = [key for key in self.menus if self.keys.count(key) == 1]
        matters = {key: self._peak_without(key, choice) for key in single}
        for key in sorted(single, key=matters.__getitem__)[:_LOWERED]:
            most, held = self._room(key, choice, self.peak(choice))
            option = ask(key, max(1, most - held), 0)
            if option is not None:
                lower = Choice({**choice.options, key: option}, choice.kept)
                choice = min(choice, lower, key=self.peak)
        return choice

    def _peak_without(self, key: str, choice: Choice) -> int:
        """The peak if the region of one call needed nothing."""
        figures = self._figures_of(choice)
        figures[:, self.keys.index(key)] = 0
        return int(self._peaks_with(choice.kept).of(*figures).max())

    def _room(self, key: str, choice: Choice, budget_bytes: int) -> tuple[int, int]:
        """What a region of one call may need by itself, and may hold, where the others are as they are."""
        peaks, figures, call = self._peaks_with(choice.kept), self._figures_of(choice), self.keys.index(key)
        own = [call, len(self.keys) + call]  # its forward's peak and its backward's
        figures[:2, call] = budget_bytes  # beside which all else is there
        most = budget_bytes - int((peaks.of(*figures)[own] - budget_bytes).max())
        figures[:2, call], figures[2, call] = 0, budget_bytes
        held = budget_bytes - int((peaks.of(*figures) - budget_bytes).max())
        return most, held


def _figures(options: Sequence[Option]) -> Ints:
    """Bytes of shape (3, options): peaks of their forwards, of their backwards, what they hold in between."""
    peaks = [option.peaks for option in options]
    return np.array([[p.forward_bytes, p.backward_bytes, p.held_bytes] for p in peaks], np.int64).T


def _excess(peaks: Ints, budget_bytes: int) -> Ints:
    """What peaks exceed a budget by, summed over the last dimension."""
    return np.maximum(peaks - budget_bytes, 0).sum(axis=-1)


def _without_seconds(graph: Graph) -> Graph:
    none = dict.fromkeys((*fields_in("seconds", Node), *fields_in("price", Node)), 0.0)
    nodes = (replace(node, **none) for node in graph.nodes)
    return replace(graph, nodes=tuple(nodes))
