"""Recomputation as an integer program, solved exactly or by rounding its linear relaxation."""

from __future__ import annotations

import logging
from typing import Any, Literal

import numpy as np
from scipy import optimize  # pyright: ignore[reportMissingTypeStubs]

from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ..schedules.simulator import simulate
from ._candidates import fastest_that_fits, trade_off
from ._checkmate.program import PEAK, Program
from ._checkmate.relaxation import sweep
from ._checkmate.rounding import Point, RoundingProblem
from ._progress import SearchProgress

log = logging.getLogger(__name__)

highs: Any = optimize  # scipy's functions carry no types


def plan_checkmate(
    graph: Graph,
    budget_bytes: int,
    *,
    method: Literal["lp", "milp"] = "lp",
    time_limit: float = 60.0,
    most_stages: int | None = None,
    progress: bool = False,
) -> Schedule:
    """The fastest schedule found in which each step recomputes any set of nodes, as often as it likes.

    `"milp"` solves the integer program for the budget; if it ends before `time_limit` the answer is optimal among the
    schedules that run a node at most once in a step. Otherwise it is the best one found, and a warning in the log
    says that it is not proven optimal. `"lp"` solves the linear relaxation at seven memory limits between a bound on
    the lowest peak and the plain one and rounds each in two phases: what is resident between steps is rounded, at 19
    thresholds and at 9 densities of spread-out thresholds, then the least recomputation for it follows. Each rounding
    is tried as it stands and with all that a backward brought back held to its last use. The simulator judges the
    outcome; it is rarely optimal. These schedules do not depend on the budget and are remembered for the last few
    graphs.

    The program has a column for each node in each step. To 63 nodes each backward is a step; beyond, consecutive
    backwards share one (4000 / n steps, at least 18), before which all that they need is recomputed. Beyond 320 nodes
    the program is one of groups of consecutive nodes, of which all is kept or all is dropped, apart from what other
    groups read. To 40 nodes, values may be recomputed in the forward too. Optimal refers to that program.

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.
        method: `"lp"` (relaxation and rounding) or `"milp"` (integer program).
        time_limit: Seconds after which the search ends with the best that it has.
        most_stages: Steps of the backward in the program; None stands for the number above.
        progress: Whether the solver and the sweep print how far they are; on a terminal, the sweep shows a bar anyway.

    Returns:
        A schedule whose simulated peak is within the budget.

    Raises:
        InfeasibleBudgetError: No schedule was found that fits; with `"milp"`, none exists unless the log says that
            time ran out.
        ValueError: An unknown method or a number out of range.

    Reference: Jain et al. 2020 (Checkmate), sections 4 and 5; as compared with in Beaumont et al. 2024, section 5.4.
    """
    if method not in ("lp", "milp"):
        raise ValueError(f"method is {method!r}, expected 'lp' or 'milp'")
    if not time_limit > 0:
        raise ValueError(f"time_limit is {time_limit} seconds, expected a positive number")
    if most_stages is not None and most_stages < 1:
        raise ValueError(f"most_stages is {most_stages}, expected at least 1")
    if method == "milp" and graph.nodes:
        return _plan_exactly(graph, budget_bytes, time_limit, most_stages, progress)
    family = sweep(graph, time_limit, most_stages, progress=progress)
    return fastest_that_fits(graph, budget_bytes, family, planner="checkmate")


def _plan_exactly(
    graph: Graph, budget_bytes: int, time_limit: float, most_stages: int | None, progress: bool
) -> Schedule:
    """The integer program's answer; where time runs out, the best of it and of the roundings."""
    problem = RoundingProblem(graph, most_stages)
    program = problem.program
    candidates: list[Schedule] = []
    limit = budget_bytes / program.unit_bytes
    share = 0.7 * time_limit  # the rest is for the roundings, if they are needed
    solution, is_proven = _integral(program, program.seconds, limit, share, progress=progress)
    if solution is not None:
        candidates.append(problem.rounded(solution))
        if simulate(graph, candidates[0]).peak_bytes > budget_bytes:
            is_proven = False  # the groups' memory is an estimate
    if solution is None and is_proven:
        solution, is_proven = _integral(program, np.eye(1, len(program.low), PEAK)[0], np.inf, share, progress=progress)
        if solution is not None:
            candidates.append(problem.rounded(solution))
    if not is_proven:
        log.warning(
            "checkmate: not proven optimal: the integer program did not end within time_limit = %g s; the answer is "
            "the best feasible one found",
            time_limit,
        )
        roundings = sweep(graph, time_limit - share, most_stages, progress=progress)
        candidates += [candidate.schedule for candidate in roundings]
    return fastest_that_fits(graph, budget_bytes, trade_off(graph, candidates), planner="checkmate")


def _integral(
    program: Program, costs: Point, peak: float, time_limit: float, *, progress: bool
) -> tuple[Point | None, bool]:
    """The best integral point found, and whether nothing better exists (with none found: whether none exists)."""
    high = program.high.copy()
    high[PEAK] = peak
    if peak < 0:
        return None, True
    with SearchProgress("checkmate") as bar:
        bar.update(0.0, f"integer program of {len(costs)} columns, at most {time_limit:.0f} s")
        result: Any = highs.milp(
            costs,
            constraints=highs.LinearConstraint(program.matrix, -np.inf, program.bounds),
            bounds=highs.Bounds(program.low, high),
            integrality=program.is_integral,
            options={"time_limit": time_limit, "mip_rel_gap": 0.0, "disp": progress},
        )
    return result.x, result.status in (0, 2)
