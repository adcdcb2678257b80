"""The canonical strategies of a graph that are best by equations (1) and (2) at some internal budget."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from ...schedules.graph import Graph
from ...schedules.schedule import Schedule
from ...schedules.storages import merge_views
from .canonical import lower_sequence
from .lower_sets import Family, LowerSetProblem, all_lower_sets, members, near_lower_sets, pruned_lower_sets
from .program import Objective, best_sequence, least_budget_units
from .table import LowerSetTable, tabulate

_log = logging.getLogger(__name__)

_MOST_LOWER_SETS = 12_000  # of which steps are then left out; of a narrowed family all steps are kept
_MOST_NEAR_LOWER_SETS = 4_000
_RESOLUTION = 3072  # the model of memory is cruder than that: what a schedule needs is for the simulator to say
_NUM_BUDGETS = {"all": 8, "pruned": 32}


def strategies(graph: Graph, family: Family, objectives: tuple[Objective, ...], *, liveness: bool) -> list[Schedule]:
    """The canonical strategies of the best sequences, each with its last part kept and not.

    Args:
        graph: The operations.
        family: The lower sets to search.
        objectives: Least overhead, most overhead, or both.
        liveness: Whether values go right after their last use, or with their part.
    """
    storages = merge_views(graph)
    total = max(1, sum(storages.sizes))
    memories = tuple(round(size * _RESOLUTION / total) for size in storages.sizes)
    problem = LowerSetProblem(storages.seconds, memories, storages.edges)
    table = _planning_table(problem, family)
    schedules: dict[Schedule, None] = {}
    for part in _best_partitions(table, objectives, _NUM_BUDGETS[family]):
        for keeps_last in (True, False):
            schedule = lower_sequence(graph, storages, part, liveness=liveness, keeps_last=keeps_last)
            schedules.setdefault(schedule)
    return list(schedules)


def _planning_table(problem: LowerSetProblem, family: Family) -> LowerSetTable:
    count = len(problem.times)
    pruned = pruned_lower_sets(count, problem.edges)
    if family == "pruned":
        return tabulate(problem, pruned, is_complete=False)
    found = all_lower_sets(count, problem.edges, limit=_MOST_LOWER_SETS)
    if found is not None:
        return tabulate(problem, found, is_complete=True)
    near, window = near_lower_sets(count, problem.edges, _MOST_NEAR_LOWER_SETS)
    _log.info(  # `auto` asks as well, whose users have not asked for it
        "kusumoto_exact: the graph has more than %d lower sets; searched are the %d within %s places of the execution "
        "order and the pruned ones",
        _MOST_LOWER_SETS,
        len(near),
        window,
    )
    merged = sorted({*near, *pruned}, key=lambda mask: (mask.bit_count(), mask))
    return tabulate(problem, merged, is_complete=False)


def _best_partitions(table: LowerSetTable, objectives: tuple[Objective, ...], num_budgets: int) -> Iterator[list[int]]:
    """For each node the number of its part: all in one, then by the best sequences at several budgets.

    The budgets run from the least one to M(V), about what it takes to cache everything, dense at the low end.
    """
    whole = len(table.masks) - 1
    least = least_budget_units(table)
    most = max(float(least), float(table.memory[-1]))
    found: dict[tuple[int, ...], None] = {(whole,) if whole else (): None}
    for step in range(num_budgets):
        budget_units = least + (most - least) * (step / num_budgets) ** 2
        for objective in objectives:
            rows = best_sequence(table, budget_units, objective)
            assert rows is not None, "the least budget suffices"
            found.setdefault(tuple(rows))
    for sequence in found:
        part = [0] * table.masks[-1].bit_length()
        previous = 0
        for number, row in enumerate(sequence):
            for v in members(table.masks[row] & ~previous):
                part[v] = number
            previous = table.masks[row]
        yield part
