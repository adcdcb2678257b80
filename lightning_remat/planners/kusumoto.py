"""Recomputation along an increasing sequence of lower sets, by dynamic programming."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..errors import InfeasibleBudgetError
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ._candidates import Candidate, fastest_that_fits, trade_off
from ._lower_sets.lower_sets import MAXIMUM_LOWER_SETS, Family, all_lower_sets, masks, members, pruned_lower_sets
from ._lower_sets.lower_sets import LowerSetProblem as LowerSetProblem
from ._lower_sets.program import Objective, best_sequence, least_budget_units
from ._lower_sets.strategies import strategies
from ._lower_sets.table import LowerSetTable, tabulate


class SequenceCost(NamedTuple):
    """What a sequence of lower sets costs.

    Attributes:
        overhead: Time of the recomputation, equation (1), in the unit of the problem's times.
        peak: Largest memory of the backward of any part, equation (2), in the unit of its memories.
    """

    overhead: float
    peak: float


def lower_sets(problem: LowerSetProblem, family: Family = "all") -> list[frozenset[int]]:
    """The lower sets of the problem's graph by ascending size, from ∅ to V.

    >>> [sorted(s) for s in lower_sets(LowerSetProblem((1, 1, 1), (1, 1, 1), ((0, 1), (0, 2))))]
    [[], [0], [0, 1], [0, 2], [0, 1, 2]]

    Args:
        problem: The graph.
        family: `"all"`, or `"pruned"`: ∅, V and for each node what it depends on, itself included.

    Raises:
        ValueError: There are more than 2**16.

    Reference: Kusumoto et al. 2019, sections 2 and 4.3.
    """
    return [frozenset(members(mask)) for mask in _family(problem, family)]


def cost(problem: LowerSetProblem, sequence: Sequence[frozenset[int]]) -> SequenceCost:
    """Overhead and peak of the canonical strategy of `sequence`.

    >>> chain = LowerSetProblem((1, 1, 1, 1), (1, 1, 1, 1), ((0, 1), (1, 2), (2, 3)))
    >>> cost(chain, [frozenset({0, 1}), frozenset({0, 1, 2, 3})])
    SequenceCost(overhead=3, peak=5)

    Raises:
        ValueError: The sequence does not increase, holds what is no lower set, or does not end with V.

    Reference: Kusumoto et al. 2019, equations (1) and (2).
    """
    before, after = masks(len(problem.times), problem.edges)
    whole = (1 << len(problem.times)) - 1

    def joined(table: list[int], nodes: int) -> int:
        result = 0
        for v in members(nodes):
            result |= table[v]
        return result

    def weight(nodes: int) -> float:
        return sum(problem.memories[v] for v in members(nodes))

    overhead: float = 0
    peak: float = 0
    cached = previous = 0
    for position, lower_set in enumerate(sequence):
        present = sum(1 << v for v in lower_set)
        if present & ~whole or joined(before, present) & ~present:
            raise ValueError(f"sequence[{position}] is no lower set: an edge enters it from outside")
        if previous & ~present or previous == present:
            raise ValueError(f"sequence[{position}] does not strictly contain the lower set before it")
        part = present & ~previous
        boundary = joined(before, whole & ~present) & present
        readers = joined(after, present) & ~present  # δ⁺(L) ∖ L
        siblings = joined(before, readers) & ~present  # δ⁻(δ⁺(L)) ∖ L: δ⁻ of δ⁺(L) ∩ L lies in L
        overhead += sum(problem.times[v] for v in members(part & ~boundary))
        peak = max(peak, weight(cached) + 2 * weight(part) + weight(readers) + weight(siblings))
        cached |= boundary
        previous = present
    if previous != whole:
        raise ValueError(f"the sequence ends with {previous.bit_count()} of {len(problem.times)} nodes, not with all")
    return SequenceCost(overhead, peak)


def solve(
    problem: LowerSetProblem,
    budget: float,
    *,
    lower_sets: Family = "all",
    objective: Objective = "time",
) -> list[frozenset[int]]:
    """The sequence of lower sets of least overhead by equation (1) whose peak by equation (2) is within the budget.

    Optimal over all sequences of the family. Memories that are no integers are rounded up to whole units of 2**-52
    of their sum, and the budget down.

    >>> chain = LowerSetProblem((1, 1, 1, 1), (1, 1, 1, 1), ((0, 1), (1, 2), (2, 3)))
    >>> cost(chain, solve(chain, 5))
    SequenceCost(overhead=1, peak=5)

    Args:
        problem: Nodes, costs and edges.
        budget: The most memory, in the unit of the problem's memories.
        lower_sets: `"all"`: ExactDP. `"pruned"`: ApproxDP, whose family is as small as the graph.
        objective: `"time"`: time-centric, least overhead. `"memory"`: memory-centric, the most overhead.

    Returns:
        An increasing sequence of lower sets, V last.

    Raises:
        InfeasibleBudgetError: No sequence fits; `minimum_bytes` is the least budget for which one does.
        ValueError: An unknown option, or too many lower sets to enumerate.

    Reference: Kusumoto et al. 2019, Algorithm 1; sections 4.2 to 4.4.
    """
    _check_objective(objective)
    if not budget >= 0:
        raise ValueError(f"budget is {budget}, expected memory that is not negative")
    table = family_table(problem, lower_sets)
    rows = best_sequence(table, table.units_of(budget), objective)
    if rows is None:
        least = table.amount_of(least_budget_units(table))
        raise InfeasibleBudgetError(
            f"no sequence of {'' if lower_sets == 'all' else 'pruned '}lower sets peaks below {least}, and the budget "
            f"is {budget}: raise it to at least that",
            minimum_bytes=least,
            budget_bytes=budget,
        )
    return [frozenset(members(table.masks[row])) for row in rows]


def minimum_budget(problem: LowerSetProblem, lower_sets: Family = "all") -> float:
    """The least budget for which `solve` succeeds, in the unit of the problem's memories.

    >>> minimum_budget(LowerSetProblem((1, 1, 1, 1), (1, 1, 1, 1), ((0, 1), (1, 2), (2, 3))))
    5
    """
    table = family_table(problem, lower_sets)
    return table.amount_of(least_budget_units(table))


def family_table(problem: LowerSetProblem, family: Family) -> LowerSetTable:
    """The table of one of the two families."""
    return tabulate(problem, _family(problem, family), is_complete=family == "all")


def _family(problem: LowerSetProblem, family: Family) -> list[int]:
    count = len(problem.times)
    if family == "pruned":
        return pruned_lower_sets(count, problem.edges)
    if family != "all":
        raise ValueError(f"lower_sets is {family!r}, expected 'all' or 'pruned'")
    found = all_lower_sets(count, problem.edges)
    if found is None:
        raise ValueError(
            f"a graph of {count} nodes has more than {MAXIMUM_LOWER_SETS} lower sets, because many of them are "
            "independent: choose lower_sets='pruned'"
        )
    return found


def plan_kusumoto_exact(
    graph: Graph, budget_bytes: int, *, objective: Objective | None = None, liveness: bool = True
) -> Schedule:
    """The fastest canonical strategy that fits, of the best by equations (1) and (2) at several internal budgets.

    ExactDP searches all lower sets of the graph's storages, ApproxDP's sequences are among the candidates too. Every
    node is recomputed at most once. Equation (2) is taken in steps of 1/3072 of all memory; the true peak is the
    simulator's. The candidates depend on the graph alone, so that more budget never makes the
    answer slower. Where the graph has more than 12 000 lower sets (many independent branches), those nearest to the
    execution order are searched, which is logged at level INFO.

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.
        objective: `"time"`: the time-centric strategies, of least overhead at each internal budget. `"memory"`: the
            memory-centric ones, of most overhead, whose large parts liveness analysis shrinks well. None: both, of
            which the first are the faster ones where memory is ample and the second reach lower.
        liveness: Whether values go right after their last use, or with their part.

    Returns:
        A schedule whose simulated peak is within the budget.

    Raises:
        InfeasibleBudgetError: None of these strategies fits.
        ValueError: An unknown objective.

    Reference: Kusumoto et al. 2019, sections 4.2 and 4.4, Algorithm 1.
    """
    family = _exact_family(graph, _objectives(objective), liveness)
    return fastest_that_fits(graph, budget_bytes, family, planner="kusumoto_exact")


def plan_kusumoto_approx(
    graph: Graph, budget_bytes: int, *, objective: Objective | None = None, liveness: bool = True
) -> Schedule:
    """The fastest canonical strategy over pruned lower sets that fits, of the best at several internal budgets.

    As `plan_kusumoto_exact`, in a fraction of its time: there are no more pruned lower sets than nodes.

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.
        objective: `"time"` (time-centric), `"memory"` (memory-centric), or None for both.
        liveness: Whether values go right after their last use, or with their part.

    Returns:
        A schedule whose simulated peak is within the budget.

    Raises:
        InfeasibleBudgetError: None of these strategies fits.
        ValueError: An unknown objective.

    Reference: Kusumoto et al. 2019, sections 4.3 and 4.4.
    """
    family = _approx_family(graph, _objectives(objective), liveness)
    return fastest_that_fits(graph, budget_bytes, family, planner="kusumoto_approx")


@lru_cache(maxsize=8)
def _approx_family(graph: Graph, objectives: tuple[Objective, ...], liveness: bool) -> tuple[Candidate, ...]:
    return trade_off(graph, strategies(graph, "pruned", objectives, liveness=liveness))


@lru_cache(maxsize=8)
def _exact_family(graph: Graph, objectives: tuple[Objective, ...], liveness: bool) -> tuple[Candidate, ...]:
    pruned = [candidate.schedule for candidate in _approx_family(graph, objectives, liveness)]
    return trade_off(graph, [*pruned, *strategies(graph, "all", objectives, liveness=liveness)])


def _objectives(objective: Objective | None) -> tuple[Objective, ...]:
    if objective is None:
        return "time", "memory"
    _check_objective(objective)
    return (objective,)


def _check_objective(objective: str) -> None:
    if objective not in ("time", "memory"):
        raise ValueError(f"objective is {objective!r}, expected 'time' or 'memory'")
