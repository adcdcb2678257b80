"""The linear relaxation of the integer program at several memory limits, rounded in two phases."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import optimize  # pyright: ignore[reportMissingTypeStubs]

from ...lowering import keep_everything
from ...schedules.floor import find_floor
from ...schedules.graph import Graph
from ...schedules.simulator import simulate
from .._candidates import Candidate, trade_off
from .._progress import SearchProgress
from .program import PEAK, Program
from .rounding import Point, RoundingProblem

log = logging.getLogger(__name__)

highs: Any = optimize  # scipy's functions carry no types

_LIMITS = (0.32, 0.12, 0.7, 0.03, 0.2, 0.48, 0.07)  # between a bound on the lowest peak and the plain one; in the
# order in which they cover the range best, should time run out
_DENSITIES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 4.0)
_THRESHOLDS = tuple(np.linspace(0.05, 0.95, 19).tolist())


class _CutShortError(Exception):
    """Time ran out in the midst of a sweep: raised, since what is returned is remembered.

    Attributes:
        family: What the roundings reach so far.
        num_limits: At how many of the memory limits the relaxation was solved.
    """

    def __init__(self, family: tuple[Candidate, ...], num_limits: int) -> None:
        super().__init__()
        self.family, self.num_limits = family, num_limits


def sweep(graph: Graph, time_limit: float, most_stages: int | None, *, progress: bool) -> tuple[Candidate, ...]:
    """The roundings of the relaxation at each memory limit, and the plain step, of which no other beats any.

    Depends on the budget in nothing, and is remembered for the last few graphs. Where time runs out before the last
    limit, a warning in the log says so, and the next call begins anew.

    Args:
        graph: The operations.
        time_limit: Seconds.
        most_stages: Steps of the backward in the program; None stands for a number that suits the graph.
        progress: Whether to print each memory limit.
    """
    try:
        return _swept(graph, time_limit, most_stages, progress)
    except _CutShortError as short:
        log.warning(
            "checkmate: time_limit of %g s ended the sweep after %d of %d memory limits; the answer is not proven "
            "optimal, and a longer limit may improve it",
            time_limit,
            short.num_limits,
            len(_LIMITS),
        )
        return short.family


@lru_cache(maxsize=8)
def _swept(graph: Graph, time_limit: float, most_stages: int | None, progress: bool) -> tuple[Candidate, ...]:
    plain = keep_everything(graph)
    if not graph.nodes:
        return trade_off(graph, [plain])
    end = time.monotonic() + time_limit
    problem = RoundingProblem(graph, most_stages)
    program = problem.program
    low, top = find_floor(graph).bytes, simulate(graph, plain).peak_bytes
    found = {plain: None}
    even = np.full(len(program.low), 1.0)  # a point that every density of even spacing rounds from
    found.update((schedule, None) for spread in _spreads(graph) for schedule in problem.roundings(even, spread))
    with SearchProgress("checkmate") as bar:
        for number, fraction in enumerate(_LIMITS):
            left = end - time.monotonic()
            if left <= 0:
                raise _CutShortError(trade_off(graph, found), number)
            bar.update(number / len(_LIMITS), f"relaxation {number + 1} of {len(_LIMITS)}")
            if progress:
                print(f"checkmate: relaxation {number + 1} of {len(_LIMITS)}, {left:.0f} s left", flush=True)
            solution = _relaxed(program, (low + fraction * (top - low)) / program.unit_bytes, left)
            if solution is None and time.monotonic() >= end:
                raise _CutShortError(trade_off(graph, found), number)
            if solution is not None:
                thresholds = [*(np.full(len(graph.nodes), t) for t in _THRESHOLDS), *_spreads(graph)]
                found.update((schedule, None) for t in thresholds for schedule in problem.roundings(solution, t))
    return trade_off(graph, found)


def _spreads(graph: Graph) -> Iterator[Point]:
    """Thresholds spread over the nodes as random ones would be, so that of equal fractions some are held.

    Multiples of the golden ratio, modulo one, fall evenly however many there are: a third held is every third.
    """
    order = np.arange(1, len(graph.nodes) + 1) * ((5**0.5 - 1) / 2) % 1.0
    for density in _DENSITIES:
        yield np.maximum(order / density, 1e-3)


def _relaxed(program: Program, peak: float, seconds: float) -> Point | None:
    """The optimum of the linear relaxation under a memory limit, if there is one and it is found in time."""
    high = program.high.copy()
    high[PEAK] = peak
    result: Any = highs.linprog(
        program.seconds,
        A_ub=program.matrix,
        b_ub=program.bounds,
        bounds=np.stack([program.low, high], axis=1),
        method="highs-ds",
        options={"time_limit": max(0.1, seconds)},
    )
    return result.x
