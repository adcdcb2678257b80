"""Recomputation as an integer program, solved exactly or by rounding its linear relaxation."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import optimize  # pyright: ignore[reportMissingTypeStubs]

from ..graph import Graph
from ..lowering import lower_kept, reads
from ..schedule import Schedule
from ..simulator import simulate
from .checkmate_program import PEAK, Program, build_program
from .family import fastest_that_fits
from .gradient_levels import gradient_levels
from .node_groups import coarsen, group_nodes
from .progress import SearchProgress
from .residency import lower_residency

log = logging.getLogger(__name__)

Solution = NDArray[np.float64]
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
    if method == "milp":
        return _plan_exactly(graph, budget_bytes, time_limit, most_stages, progress)
    family = _family(graph, time_limit, most_stages, progress)
    return fastest_that_fits(graph, budget_bytes, family, planner="checkmate")


_MOST_NODES = 320
_FORWARD_FREE_NODES = 40
_NODE_STAGES = 4000  # nodes times stages: a second or two for the relaxation
_LEAST_STAGES = 18
_LIMITS = (0.32, 0.12, 0.7, 0.03, 0.2, 0.48, 0.07)  # between a bound on the lowest peak and the plain one; in the
# order in which they cover the range best, should time run out
_DENSITIES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 4.0)
_THRESHOLDS = tuple(np.linspace(0.05, 0.95, 19).tolist())


@lru_cache(maxsize=8)
def _family(graph: Graph, time_limit: float, most_stages: int | None, progress: bool) -> tuple[Schedule, ...]:
    """The roundings of the relaxation at each memory limit, and the plain step."""
    plain = lower_kept(graph, range(len(graph.nodes)))
    if not graph.nodes:
        return (plain,)
    end = time.monotonic() + time_limit
    problem = _Problem(graph, most_stages)
    program = problem.program
    low, top = _lower_bound(graph), simulate(graph, plain).peak_bytes
    found = {plain: None}
    even = np.full(len(program.low), 1.0)  # a point that every density of even spacing rounds from
    found.update((schedule, None) for spread in _spreads(graph) for schedule in problem.roundings(even, spread))
    with SearchProgress("checkmate") as bar:
        for number, fraction in enumerate(_LIMITS):
            left = end - time.monotonic()
            if left <= 0:
                log.warning(
                    "checkmate: time_limit of %g s ended the sweep after %d of %d memory limits; the answer is not "
                    "proven optimal, and a longer limit may improve it",
                    time_limit,
                    number,
                    len(_LIMITS),
                )
                break
            bar.update(number / len(_LIMITS), f"relaxation {number + 1} of {len(_LIMITS)}")
            if progress:
                print(f"checkmate: relaxation {number + 1} of {len(_LIMITS)}, {left:.0f} s left", flush=True)
            solution = _relaxed(program, (low + fraction * (top - low)) / program.unit_bytes, left)
            if solution is not None:
                thresholds = [*(_same(graph, t) for t in _THRESHOLDS), *_spreads(graph)]
                found.update((schedule, None) for t in thresholds for schedule in problem.roundings(solution, t))
    return tuple(found)


def _same(graph: Graph, threshold: float) -> Solution:
    return np.full(len(graph.nodes), threshold)


def _spreads(graph: Graph) -> Iterator[Solution]:
    """Thresholds spread over the nodes as random ones would be, so that of equal fractions some are held.

    Multiples of the golden ratio, modulo one, fall evenly however many there are: a third held is every third.
    """
    order = np.arange(1, len(graph.nodes) + 1) * ((5**0.5 - 1) / 2) % 1.0
    for density in _DENSITIES:
        yield np.maximum(order / density, 1e-3)


def _lower_bound(graph: Graph) -> int:
    """No schedule peaks below this: each action needs what it reads, makes and saves, and the gradients."""
    _, highest = gradient_levels(graph)
    most = 0
    for n, node in enumerate(graph.nodes):
        made = node.output_bytes + node.tape_bytes + node.forward_workspace_bytes
        read = sum(graph.nodes[r].output_bytes for r in {graph.roots[i] for i in reads(graph, n)})
        saved = sum(graph.nodes[r].output_bytes for r in {graph.roots[i] for i in node.saved})
        most = max(most, read + made, saved + node.tape_bytes + highest[n])
    return graph.input_bytes + graph.static_bytes + most


def _relaxed(program: Program, peak: float, seconds: float) -> Solution | None:
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


def _peak_costs(program: Program) -> Solution:
    costs = np.zeros(len(program.low))
    costs[PEAK] = 1.0
    return costs


def _plan_exactly(
    graph: Graph, budget_bytes: int, time_limit: float, most_stages: int | None, progress: bool
) -> Schedule:
    """The integer program's answer; where time runs out, the best of it and of the roundings."""
    if not graph.nodes:
        return fastest_that_fits(graph, budget_bytes, [Schedule(())], planner="checkmate")
    problem = _Problem(graph, most_stages)
    program = problem.program
    candidates: list[Schedule] = []
    limit = budget_bytes / program.unit_bytes
    share = 0.7 * time_limit  # the rest is for the roundings, if they are needed
    solution, is_proven = _integral(program, program.seconds, limit, share, progress)
    if solution is not None:
        candidates.append(problem.rounded(solution))
        if simulate(graph, candidates[0]).peak_bytes > budget_bytes:
            is_proven = False  # the groups' memory is an estimate
    if solution is None and is_proven:
        solution, is_proven = _integral(program, _peak_costs(program), np.inf, share, progress)
        if solution is not None:
            candidates.append(problem.rounded(solution))
    if not is_proven:
        log.warning(
            "checkmate: not proven optimal: the integer program did not end within time_limit = %g s; the answer is "
            "the best feasible one found",
            time_limit,
        )
        candidates += _family(graph, time_limit - share, most_stages, progress)
    return fastest_that_fits(graph, budget_bytes, candidates, planner="checkmate")


def _integral(
    program: Program, costs: Solution, peak: float, time_limit: float, progress: bool
) -> tuple[Solution | None, bool]:
    """The best integral point found, and whether nothing better exists (with none found: whether none exists)."""
    high = program.high.copy()
    high[PEAK] = peak
    if peak < 0:
        return None, True
    result: Any = highs.milp(
        costs,
        constraints=highs.LinearConstraint(program.matrix, -np.inf, program.bounds),
        bounds=highs.Bounds(program.low, high),
        integrality=program.is_integral,
        options={"time_limit": time_limit, "mip_rel_gap": 0.0, "disp": progress},
    )
    return result.x, result.status in (0, 2)


class _Problem:
    """A graph with its program, and the way from a point of the program back to a schedule.

    Beyond _MOST_NODES the program is that of groups of nodes, and its stages are such that nodes times stages stay
    about constant: the program decides for every node (or group), but not anew before every backward.
    """

    def __init__(self, graph: Graph, most_stages: int | None) -> None:
        self.graph = graph
        self.groups = group_nodes(graph, _MOST_NODES)
        self.is_grouped = len(self.groups) < len(graph.nodes)
        inner, levels = graph, gradient_levels(graph)
        self.shared: list[frozenset[int]] = []
        if self.is_grouped:
            inner, levels, self.shared = coarsen(graph, self.groups)
        self.stages = group_nodes(inner, most_stages or max(_LEAST_STAGES, _NODE_STAGES // len(inner.nodes)))
        self.is_exact = not self.is_grouped and len(self.stages) == len(graph.nodes)
        is_forward_fixed = len(inner.nodes) > _FORWARD_FREE_NODES
        self.program = build_program(inner, is_forward_fixed=is_forward_fixed, stages=self.stages, levels=levels)

    def rounded(self, solution: Solution) -> Schedule:
        """The schedule of an integral point."""
        outputs, tapes, stages = self._resident(solution, np.full(len(self.graph.nodes), 0.5))
        return lower_residency(self.graph, outputs, tapes, groups=stages, is_eager=self.is_exact)

    def roundings(self, solution: Solution, thresholds: Solution) -> Iterator[Schedule]:
        """The schedules that hold what the solution holds to at least the threshold of its node.

        The second one heeds only what is held when the backward begins, and keeps what it recomputes to its last use.
        """
        outputs, tapes, stages = self._resident(solution, thresholds)
        # The rounding may hold a view without its storage, or the other way round.
        outputs = [{n for n, root in enumerate(self.graph.roots) if root in step} for step in outputs]
        yield lower_residency(self.graph, outputs, tapes, groups=stages, is_eager=False)
        turn = len(stages) - 1
        yield lower_kept(self.graph, outputs[turn], tapes[turn])

    def _resident(self, solution: Solution, thresholds: Solution) -> tuple[list[set[int]], list[set[int]], list[range]]:
        """Outputs and tapes at the end of each step of `lower_residency`, and the nodes of its steps."""
        bar = thresholds[[group[0] for group in self.groups]]
        forward = [stage[-1] for stage in self.stages]
        steps = [*forward, *range(len(self.program.outputs) - len(self.stages), len(self.program.outputs))]
        outputs = [{i for i, c in self.program.outputs[s].items() if solution[c] >= bar[i]} for s in steps]
        tapes = [{i for i, c in self.program.tapes[s].items() if solution[c] >= bar[i]} for s in steps]
        stages = self.stages
        if self.is_grouped:
            stages = [range(self.groups[stage[0]].start, self.groups[stage[-1]].stop) for stage in stages]
            outputs = [self._roots(o, t) for o, t in zip(outputs, tapes, strict=True)]
            tapes = [{n for g in step for n in self.groups[g]} for step in tapes]
        return outputs, tapes, stages

    def _roots(self, outputs: set[int], tapes: set[int]) -> set[int]:
        """What the outputs and tapes of groups stand for."""
        roots = {r for g in outputs for r in self.shared[g]}
        return roots | {n for g in tapes for n in self.groups[g] if n not in self.shared[g]}
