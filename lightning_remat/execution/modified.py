"""Values that were changed in place between a forward and its backward: the error, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

T = TypeVar("T")

_changed: WeakKeyDictionary[Any, set[tuple[str, int]]] = WeakKeyDictionary()
"""Captured graph → names of operations, and places of what they read that changed before their backward."""

_MOST_RETRIES = 8
"""Values that are found, one by one, to change between a forward and its backward."""


class ModifiedError(RuntimeError):
    """A backward would use a value other than its forward, as something was changed in place in between."""


def retried(run: Callable[[], T]) -> T:
    """What `run` returns, once more if a value was changed before the backward: from then on it is copied."""
    for _ in range(_MOST_RETRIES):
        try:
            return run()
        except ModifiedError:
            continue
    return run()


def note_change(program: Any, n: int, slot: int) -> None:
    """Operation n reads what changes before its backward: its value is copied from now on, by other plans, too."""
    program.copied.add((n, slot))
    _changed.setdefault(program.traced.captured, set()).add((program.steps[n].operation.name, slot))


def known_changes(program: Any) -> set[tuple[int, int]]:
    """What is known of the graph of a program, by other programs: operations and places."""
    known = _changed.get(program.traced.captured, set[tuple[str, int]]())
    steps: list[Any] = list(program.steps if known else ())
    found: set[tuple[int, int]] = set()
    for n, step in enumerate(steps):
        name = step.operation.name
        found.update((n, slot) for slot in (*step.external, *step.inputs) if (name, slot) in known)
    return found


def modified(what: str, version: int, tensor: Tensor) -> ModifiedError:
    """The error of a backward that would use a value other than its forward."""
    return ModifiedError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is at "
        f"version {tensor._version}, expected version {version}. Remedy: use the out-of-place operation, or run the "
        "backward before the change"
    )
