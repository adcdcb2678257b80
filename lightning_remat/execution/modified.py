"""Values that were changed in place between a forward and its backward: the error, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from ..operations.evaluation import slots

T = TypeVar("T")

_changed: WeakKeyDictionary[Any, set[tuple[str, str]]] = WeakKeyDictionary()
"""Code that was captured → names of operations, and of what they read that changed before their backward."""

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


def note_change(program: Any, n: int, slot: int, values: list[Any]) -> None:
    """Operation n reads what changes before its backward: its value is copied from now on.

    So it is by other plans, and in graphs that are captured for other inputs. Of a parameter, and of views of one, it
    stays an error, as in a plain run.
    """
    traced, places = program.traced, slots(program.traced)
    node = next(i for i, place in places.items() if place == slot)
    homes = traced.operations[traced.producer[node]].lives_in if node in traced.producer else {node}
    given = [values[places[i]] for i in homes if i.op == "placeholder"]
    if not isinstance(values[slot], Tensor) or any(t.requires_grad and t.is_leaf for t in given):
        return
    program.copied.add((n, slot))
    _changed.setdefault(_origin(program), set()).add((program.steps[n].operation.name, node.name))


def known_changes(program: Any) -> set[tuple[int, int]]:
    """What is known of the graph of a program, by other programs: operations and places."""
    known = _changed.get(_origin(program), set[tuple[str, str]]())
    steps: list[Any] = list(program.steps if known else ())
    names = _names(program) if known else {}
    found: set[tuple[int, int]] = set()
    for n, step in enumerate(steps):
        name = step.operation.name
        found.update((n, slot) for slot in (*step.external, *step.inputs) if (name, names[slot]) in known)
    return found


def _origin(program: Any) -> Any:
    captured = program.traced.captured
    return captured.code or captured


def _names(program: Any) -> dict[int, str]:
    return {slot: node.name for node, slot in slots(program.traced).items()}


def modified(what: str, version: int, tensor: Tensor) -> ModifiedError:
    """The error of a backward that would use a value other than its forward."""
    return ModifiedError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is at "
        f"version {tensor._version}, expected version {version}. Remedy: use the out-of-place operation, or run the "
        "backward before the change"
    )
