"""Tapes that stay where there is room: a recomputation that brings one too is watched tensor by tensor."""

from __future__ import annotations

from bisect import bisect_right

from ...schedules.compiled_simulator import Judge
from ...schedules.graph import Graph
from ...schedules.schedule import Schedule


def with_tapes_kept(graph: Graph, schedule: Schedule, budget_bytes: int) -> Schedule:
    """The same runs, with as many of the discarded tapes kept as fit, the smallest first.

    A batch norm or a layer norm has a tape of a few numbers a channel or a row; without it the executor must catch what
    a recomputation saves, and hook all that the first run does.

    Args:
        graph: The operations.
        schedule: Valid, and within the budget.
        budget_bytes: The true peak that must not be exceeded.
    """
    early = sorted(
        _discards_before_reruns(schedule), key=lambda position: graph.nodes[schedule.actions[position].node].tape_bytes
    )
    judge = Judge(graph)

    def without(count: int) -> Schedule:
        gone = {*early[:count]}
        return Schedule(tuple(a for position, a in enumerate(schedule) if position not in gone))

    counts = range(1, len(early) + 1)
    most = bisect_right(counts, budget_bytes, key=lambda count: judge.cost(without(count)).peak_bytes)
    return without(most) if most else schedule


def _discards_before_reruns(schedule: Schedule) -> list[int]:
    """Positions of those discards of a tape after which the operation runs again for its output, too."""
    waiting: dict[int, int] = {}  # operation -> position
    has_output: set[int] = set()
    found: list[int] = []
    for position, (kind, n) in enumerate(schedule):
        if kind == "T":
            waiting[n] = position
        elif kind == "D":
            has_output.discard(n)
        elif kind == "F":
            if n in waiting and n not in has_output:
                found.append(waiting[n])
            waiting.pop(n, None)
            has_output.add(n)
    return found
