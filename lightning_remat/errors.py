"""What can go wrong, as exceptions that carry their facts as attributes and travel between processes."""

import math
from functools import partial
from typing import Any

from .budget import ALL_BYTES


class InfeasibleBudgetError(ValueError):
    """No schedule of the planner's family fits the budget.

    Attributes:
        minimum_bytes: The lowest peak that the planner can reach (for an abstract problem: in the problem's own
            unit). At exactly this budget it succeeds.
        budget_bytes: The budget that was asked for.
        node: Name of the node whose action sets that lowest peak, where one is known.
    """

    def __init__(
        self,
        message: str,
        *,
        minimum_bytes: float,
        budget_bytes: float | None = None,
        node: str | None = None,
    ) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes
        self.budget_bytes = budget_bytes
        self.node = node

    @property
    def sufficient_bytes(self) -> int:
        """`minimum_bytes` as a budget; where it is infinite, as no budget is known to suffice, one that is none."""
        return math.ceil(min(self.minimum_bytes, ALL_BYTES))

    def __reduce__(self) -> tuple[Any, ...]:
        facts = {"minimum_bytes": self.minimum_bytes, "budget_bytes": self.budget_bytes, "node": self.node}
        return partial(type(self), **facts), self.args


class ScheduleError(ValueError):
    """A schedule that cannot be parsed or breaks a rule; the message marks the offending action.

    Attributes:
        position: Index of the offending action, or None where the end of the schedule is at fault.
    """

    def __init__(self, message: str, *, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


class MismatchError(ValueError):
    """A plan is for something else than what is called."""


class TraceError(ValueError):
    """A module that cannot be captured as a graph of operations; the message names the line and the remedy.

    Attributes:
        where: The user's line at which capture stopped (`file:line`), where one is known.
    """

    def __init__(self, message: str, *, where: str | None = None) -> None:
        super().__init__(message)
        self.where = where


def check_kind(value: object, kind: type, what: str) -> None:
    """Refuses an argument that is something else than its annotation says, before it fails somewhere inside.

    Args:
        value: The argument.
        kind: What it must be.
        what: Its name, and where to get one.

    Raises:
        TypeError: It is not.
    """
    if not isinstance(value, kind):
        raise TypeError(f"got a {type(value).__name__}, expected a {kind.__name__}: {what}")
