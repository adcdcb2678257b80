"""Every planner: a plain function `(graph, budget_bytes, *, options…) -> Schedule`, one file a method."""

from __future__ import annotations

from collections.abc import Callable

from ..schedule import Schedule
from .checkmate import plan_checkmate
from .auto import plan_auto
from .chen_cheap import plan_chen_cheap
from .dtr import plan_dtr
from .feng import plan_feng
from .keep_all import plan_keep_all
from .periodic import plan_periodic

Planner = Callable[..., Schedule]

PLANNERS: dict[str, Planner] = {
    "auto": plan_auto,
    "keep_all": plan_keep_all,
    "periodic": plan_periodic,
    "chen_cheap": plan_chen_cheap,
    "checkmate": plan_checkmate,
    "dtr": plan_dtr,
    "feng": plan_feng,
}
"""Name → planner: `(graph, budget_bytes, *, options…) -> Schedule`, or `InfeasibleBudgetError`."""
