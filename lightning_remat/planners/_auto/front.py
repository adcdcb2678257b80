"""The trade-off of a graph: every schedule found that no other one beats in both peak and seconds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ...schedules.arrays import decode, encode
from ...schedules.compiled import Small
from ...schedules.graph import Graph
from ...schedules.schedule import Schedule
from .window_simulator import NONE, Problem, no_windows, work_for
from .windows import codes_of, windows_of

Recipe: TypeAlias = "tuple[Small, Small] | Schedule"
"""Values with their windows, or the schedule of another planner that windows do not describe."""


@dataclass(slots=True)
class Front:
    """States by rising peak and falling seconds.

    >>> import numpy as np
    >>> from lightning_remat.planners._auto.window_simulator import pack
    >>> graph = Graph(())
    >>> front = Front(graph, pack(graph))
    >>> windows = np.full((2, 4, 2), NONE, np.int32)
    >>> for peak, seconds in [(10, 5.0), (20, 4.0), (15, 6.0), (12, 4.5), (20, 3.0)]:
    ...     front.offer(peak, seconds, windows)
    >>> front.peaks, front.seconds
    ([10, 12, 20], [5.0, 4.5, 3.0])
    """

    graph: Graph
    problem: Problem
    peaks: list[int] = field(default_factory=list[int])
    seconds: list[float] = field(default_factory=list[float])
    _recipes: list[Recipe] = field(default_factory=list[Recipe])

    def offer(self, peak: int, seconds: float, windows: Small) -> None:
        """Takes the state in unless one that is no higher is as fast; drops those that it beats."""
        if self.is_better(peak, seconds):
            values = np.flatnonzero(windows[:, 0, 0] != NONE).astype(np.int32)
            self._insert(peak, seconds, (values, windows[values]))

    def offer_recipe(self, peak: int, seconds: float, recipe: Recipe) -> None:
        """The same of a state of another front, or of a schedule that windows describe only roughly."""
        if self.is_better(peak, seconds):
            self._insert(peak, seconds, recipe)

    def is_better(self, peak: int, seconds: float) -> bool:
        """Whether no state that is no higher is as fast."""
        at = bisect_right(self.peaks, peak)
        return not at or seconds < self.seconds[at - 1]

    def within(self, budget_bytes: int) -> int | None:
        """Index of the fastest state whose peak is within the budget, or None."""
        at = bisect_right(self.peaks, budget_bytes)
        return at - 1 if at else None

    def recipe(self, index: int) -> Recipe:
        """How a state is described."""
        return self._recipes[index]

    def windows(self, index: int) -> Small:
        """The windows of a state; where they describe it only roughly, those nearest to it."""
        recipe = self._recipes[index]
        if isinstance(recipe, Schedule):
            return windows_of(self.graph, self.problem, recipe)
        windows = no_windows(self.problem)
        values, rows = recipe
        windows[values] = rows
        return windows

    def codes(self, index: int) -> Small:
        """The schedule of a state, as actions as numbers."""
        recipe = self._recipes[index]
        if isinstance(recipe, Schedule):
            return encode(self.graph, recipe)
        return codes_of(self.problem, self.windows(index), work_for(self.problem))

    def schedule(self, index: int) -> Schedule:
        """The schedule of a state."""
        return decode(self.graph, self.codes(index))

    def _insert(self, peak: int, seconds: float, recipe: Recipe) -> None:
        first = bisect_left(self.peaks, peak)
        last = first
        while last < len(self.peaks) and self.seconds[last] >= seconds:
            last += 1
        self.peaks[first:last] = [peak]
        self.seconds[first:last] = [seconds]
        self._recipes[first:last] = [recipe]
