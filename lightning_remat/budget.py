"""Memory budgets as users write them, and bytes as people read them."""

from __future__ import annotations

import math
import re
from numbers import Integral, Real
from typing import Any

_DECIMAL_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = _DECIMAL_UNITS | {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+|%)\s*")

ALL_BYTES = 1 << 62
"""A budget that is none; sums of it and of sizes are still numbers of 64 bits."""

Budget = int | float | str


def check_budget(budget: Budget) -> Budget:
    """The budget, a number of numpy as one of Python.

    Raises:
        ValueError: It has none of the accepted forms.
    """
    budget = as_number(budget)
    parse_budget(budget, plain_peak_bytes=1, device_bytes=1)
    return budget


def check_bytes(budget_bytes: float) -> int:
    """A number of bytes as a whole one: no more fits into a part of a byte.

    Raises:
        ValueError: It is no number.
    """
    number = as_number(budget_bytes)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or math.isnan(number):
        raise ValueError(f"budget_bytes is {budget_bytes!r}, expected a number of bytes")
    return math.floor(min(number, ALL_BYTES))


def as_number(value: Any) -> Any:
    """A number of any library as one of Python; whatever else, a truth value among it, as it is."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def parse_budget(budget: Budget, *, plain_peak_bytes: int, device_bytes: int) -> int:
    """The budget in bytes.

    >>> parse_budget("1.5 GiB", plain_peak_bytes=0, device_bytes=0)
    1610612736
    >>> parse_budget("50%", plain_peak_bytes=1000, device_bytes=0)
    500

    Args:
        budget: Bytes (int), a size such as `"8GiB"` or `"800 MB"`, a fraction of the device's memory (float in
            (0, 1]), or a percentage of the plain step's peak such as `"50%"`.
        plain_peak_bytes: What percentages refer to.
        device_bytes: What fractions refer to.

    Raises:
        ValueError: The budget has none of these forms.
    """
    budget = as_number(budget)
    if isinstance(budget, bool):
        raise ValueError(f"memory_budget is {budget}, {_EXPECTED}")
    if isinstance(budget, int):
        if budget > 0:
            return budget
    elif isinstance(budget, float):
        if 0 < budget <= 1:
            return int(budget * device_bytes)
    elif isinstance(budget, str) and (match := _SIZE.fullmatch(budget)):  # pyright: ignore[reportUnnecessaryIsInstance]
        number, unit = float(match[1]), match[2].upper()
        if unit == "%" and number > 100:
            raise ValueError(f"memory_budget is {budget!r}, expected at most 100% of the plain peak")
        if unit == "%" and number > 0:
            return int(number / 100 * plain_peak_bytes)
        if unit in _UNITS and number > 0:
            return int(number * _UNITS[unit])
    raise ValueError(f"memory_budget is {budget!r}, {_EXPECTED}")


_EXPECTED = (
    'expected bytes (int), a size such as "8GiB", a fraction in (0, 1] or a part of the plain peak such as "50%"'
)


def format_bytes(count: float) -> str:
    """The count in the largest binary unit that leaves a number of at least one.

    >>> format_bytes(1536), format_bytes(7 * 2**30)
    ('1.50 KiB', '7.00 GiB')
    """
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count:.0f} B"
