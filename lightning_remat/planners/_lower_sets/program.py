"""The best sequence of lower sets under a budget, found in a table of them."""

from __future__ import annotations

from bisect import bisect_left
from math import floor
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...schedules.compiled import Floats, Ints
from .kernel import Steps, bounds, fronts, least_cached, most_cached
from .table import LowerSetTable

Objective = Literal["time", "memory"]

# Finer grids cost memory (cells of all rows) and time (cells of all arcs), and save states.
_MOST_CELLS, _FEWEST_CELLS, _CELL_ROWS, _CELL_ARCS = 65536, 128, 24e6, 4e9
_ROUNDING = 5e-5


def best_sequence(table: LowerSetTable, budget_units: float, objective: Objective) -> list[int] | None:
    """The sequence of least (`"time"`) or most (`"memory"`) overhead within the budget, as rows; None if none fits.

    Exact: Pareto fronts of (t, m) are kept for each lower set. States are left out only if a lower bound, computed
    backwards on a grid, shows that they cannot beat a guess of the optimum; the guess is raised until it holds.

    Args:
        table: The family of lower sets.
        budget_units: In the table's units; rounded down to whole ones.
        objective: What to optimize.

    Reference: Kusumoto et al. 2019, Algorithm 1 (with max in place of min at line 15 for `"memory"`).
    """
    if len(table.masks) == 1:
        return []
    # Equation (2) has less than six terms of M(V); memory comes in whole units.
    budget = float(floor(min(budget_units, 6 * float(table.memory[-1]) + 1)))
    steps = Steps(table.arcs, table.memory, table.beyond, budget)
    least = least_cached(steps)
    if least[-1] == np.inf:
        return None
    most = most_cached(steps)
    if objective == "memory":
        steps = steps._replace(arcs=table.arcs._replace(overhead=-table.arcs.overhead))
    width, bound = _bounds(steps, least, most)
    lowest, total = float(bound[0, 0]), table.total_time
    share = 0.0  # enough where the bound is exact
    while True:
        # The slack beyond the share covers the rounding of some thousand sums in single precision.
        limit = lowest + (share + _ROUNDING) * total if share < 2 else np.inf
        states, begin = fronts(steps, least, most, bound, width, limit)
        if begin[-2] < begin[-1]:
            return _trace(states.parent, begin, int(begin[-2] + np.argmin(states.t[begin[-2] : begin[-1]])))
        assert share < 2, "a feasible budget has a sequence"
        share = max(2 * share, 0.0005)


def _bounds(steps: Steps, least: Floats, most: Floats) -> tuple[float, NDArray[np.float32]]:
    count = len(steps.memory)
    largest = min(float(most[:-1].max()), float(steps.memory[-1]))  # the cache is part of V
    affordable = min(_CELL_ROWS / count, _CELL_ARCS / max(1, len(steps.arcs.source)))
    num_cells = int(min(_MOST_CELLS, max(_FEWEST_CELLS, affordable)))
    num_cells = min(num_cells, int(largest) + 2)  # a cell for each unit makes the bound exact
    width = max(1.0, largest / max(1, num_cells - 2))
    most = np.minimum(most, largest)
    most[count - 1] = np.inf
    return width, bounds(steps, least, most, num_cells, width)


def _trace(parent: Ints, begin: Ints, position: int) -> list[int]:
    """The rows from the first lower set after ∅ to V, back from a state of V."""
    rows: list[int] = []
    while parent[position] >= 0:
        rows.append(int(np.searchsorted(begin, position, side="right")) - 1)
        position = int(parent[position])
    return rows[::-1]


def least_budget_units(table: LowerSetTable) -> int:
    """The smallest budget, in the table's units, for which there is a sequence: bisection over an exact test."""

    def is_enough(budget: int) -> bool:
        return bool(least_cached(Steps(table.arcs, table.memory, table.beyond, float(budget)))[-1] < np.inf)

    most = int(2 * table.memory[-1])  # the one step ∅ → V needs 2·M(V)
    return bisect_left(range(most), True, key=is_enough)
