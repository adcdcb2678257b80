"""Every planner: a plain function `(graph, budget_bytes, *, options…) -> Schedule`, one file a method."""

from __future__ import annotations

from collections.abc import Callable

from ..schedules.schedule import Schedule
from .auto import plan_auto
from .checkmate import plan_checkmate
from .chen import plan_chen
from .chen_cheap import plan_chen_cheap
from .chen_recursive import plan_chen_recursive
from .dtr import plan_dtr
from .feng import plan_feng
from .griewank import plan_revolve
from .kusumoto import plan_kusumoto_approx, plan_kusumoto_exact
from .periodic import plan_keep_all, plan_periodic
from .rotor import plan_rotor, plan_rotor_floating

Planner = Callable[..., Schedule]

PLANNERS: dict[str, Planner] = {
    "auto": plan_auto,
    "keep_all": plan_keep_all,
    "periodic": plan_periodic,
    "chen": plan_chen,
    "chen_cheap": plan_chen_cheap,
    "chen_recursive": plan_chen_recursive,
    "checkmate": plan_checkmate,
    "dtr": plan_dtr,
    "feng": plan_feng,
    "kusumoto_exact": plan_kusumoto_exact,
    "kusumoto_approx": plan_kusumoto_approx,
    "revolve": plan_revolve,
    "rotor": plan_rotor,
    "rotor_floating": plan_rotor_floating,
}
"""Name → planner: `(graph, budget_bytes, *, options…) -> Schedule`, or `InfeasibleBudgetError`."""


def planner_of(planner: str | Planner) -> tuple[str, Planner]:
    """The name and the function of what a user gives as `planner`.

    Raises:
        ValueError: It is neither a name of `PLANNERS` nor a function.
    """
    if isinstance(planner, str):
        if planner not in PLANNERS:
            raise ValueError(f"unknown planner {planner!r}; the planners are {', '.join(sorted(PLANNERS))}")
        return planner, PLANNERS[planner]
    if not callable(planner):
        raise ValueError(f"planner is {planner!r}, expected a name of PLANNERS or a function")
    return getattr(planner, "__name__", repr(planner)), planner
