"""The trade-off of a graph: every schedule found that no other one beats in both peak and seconds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

import numpy as np

from .fast_simulator import NONE, Problem, Small, no_windows


@dataclass(slots=True)
class Front:
    """States by rising peak and falling seconds.

    >>> import numpy as np
    >>> front = Front()
    >>> windows = np.full((2, 4, 2), NONE, np.int32)
    >>> for peak, seconds in [(10, 5.0), (20, 4.0), (15, 6.0), (12, 4.5), (20, 3.0)]:
    ...     front.offer(peak, seconds, windows)
    >>> front.peaks, front.seconds
    ([10, 12, 20], [5.0, 4.5, 3.0])
    """

    peaks: list[int] = field(default_factory=list[int])
    seconds: list[float] = field(default_factory=list[float])
    _windows: list[tuple[Small, Small]] = field(default_factory=list[tuple[Small, Small]])

    def offer(self, peak: int, seconds: float, windows: Small) -> None:
        """Takes the state in unless one that is no higher is as fast; drops those that it beats."""
        at = bisect_right(self.peaks, peak)
        if at and self.seconds[at - 1] <= seconds:
            return
        first = bisect_left(self.peaks, peak)
        last = first
        while last < len(self.peaks) and self.seconds[last] >= seconds:
            last += 1
        values = np.flatnonzero(windows[:, 0, 0] != NONE).astype(np.int32)
        self.peaks[first:last] = [peak]
        self.seconds[first:last] = [seconds]
        self._windows[first:last] = [(values, windows[values])]

    def within(self, budget_bytes: int) -> int | None:
        """Index of the fastest state whose peak is within the budget, or None."""
        at = bisect_right(self.peaks, budget_bytes)
        return at - 1 if at else None

    def windows(self, problem: Problem, index: int) -> Small:
        """The windows of a state."""
        windows = no_windows(problem)
        values, rows = self._windows[index]
        windows[values] = rows
        return windows
