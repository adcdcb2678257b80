"""Asks a planner for a schedule and lets the simulator judge the answer."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..budget import check_bytes
from ..errors import InfeasibleBudgetError, check_kind
from ..planners import planner_of as planner_of
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from .plan import Plan, replayed


def plan(
    graph: Graph,
    budget_bytes: int,
    planner: str | Callable[..., Schedule] = "auto",
    *,
    like: Graph | None = None,
    **options: Any,
) -> Plan:
    """The planner's schedule for a true peak of at most `budget_bytes`, replayed by the simulator.

    >>> from lightning_remat import Graph, Node
    >>> relu = dict(kind="relu", output_bytes=100, forward_seconds=1.0, backward_seconds=2.0)
    >>> graph = Graph(tuple(Node(f"relu{i}", inputs=(i - 1,) if i else (), saved=(i,), **relu) for i in range(4)))
    >>> plan(graph, 500, "periodic").peak_bytes
    500

    Args:
        graph: The profiled operations.
        budget_bytes: Bytes of everything alive in the step at its peak.
        planner: A name of `PLANNERS`, or a function `(graph, budget_bytes, **options) -> Schedule`.
        like: The same operations at another batch size, which a planner that takes it (`auto`) starts from.
        **options: Passed to the planner.

    Returns:
        A plan whose simulated peak is within the budget.

    Raises:
        ValueError: No planner has that name, or the budget is no number.
        InfeasibleBudgetError: The planner cannot go as low; carries the lowest peak that it reaches.
        ScheduleError: A planner of the caller's returned an invalid schedule.
        TypeError: It is no graph.
    """
    check_kind(graph, Graph, "what profile returns")
    name, function = planner_of(planner)
    budget_bytes = check_bytes(budget_bytes)
    if like is not None and "like" in inspect.signature(function).parameters:
        options["like"] = like.with_reruns_priced()
    start = time.perf_counter()
    schedule = function(graph.with_reruns_priced(), budget_bytes, **options)
    return replayed(graph, budget_bytes, name, schedule, time.perf_counter() - start)


def fastest_plan(
    ways: Sequence[Graph],
    budget_bytes: int,
    planner: str | Callable[..., Schedule] = "auto",
    *,
    like: Mapping[Graph, Graph] = MappingProxyType({}),
    **options: Any,
) -> Plan:
    """The fastest plan for any of several graphs that have the same results.

    Args:
        ways: How the same operations may run, the one to prefer of those that are as fast first.
        budget_bytes: As of `plan`.
        planner: As of `plan`.
        like: Each at another batch size, where that is known.
        **options: Passed to the planner.

    Raises:
        InfeasibleBudgetError: None of them can go as low; of their errors that with the lowest peak.
    """
    plans: list[Plan] = []
    errors: list[InfeasibleBudgetError] = []
    for graph in ways:
        try:
            plans.append(plan(graph, budget_bytes, planner, like=like.get(graph), **options))
        except InfeasibleBudgetError as error:
            errors.append(error)
    if not plans:
        raise min(errors, key=lambda error: error.minimum_bytes)
    return min(plans, key=lambda made: made.simulation.seconds)
