"""What is in a container and how it is put back, past whatever its own class makes of reading and writing.

A dictionary of a class may make what it is asked for (`ACT2FN` of transformers makes modules), import it, or refuse to
be written to.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast

# What users' containers hold has no types.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

_KINDS: frozenset[Any] = frozenset((OrderedDict, dict, list, set, deque, bytearray, array))
"""The types that containers are of, or derived from; whose methods are called is the nearest one."""


def content_of(container: Any) -> Any:
    """A copy of what is in it, of Python's own type.

    >>> class Squares(OrderedDict):
    ...     def __getitem__(self, key):
    ...         return super().__getitem__(key) ** 2
    >>> numbers = Squares({3: 3})
    >>> dict(numbers), content_of(numbers)
    ({3: 9}, {3: 3})
    """
    kind = _kind_of(container)
    if isinstance(container, dict):
        return dict(kind.items(container))
    items = kind.__iter__(container)
    return set(items) if isinstance(container, set) else list(items)


def items_of(container: Any) -> list[tuple[Any, Any]]:
    """The places in a dictionary, list or deque, with what is there."""
    content = content_of(container)
    return [*(content.items() if isinstance(container, dict) else enumerate(content))]


def write_into(container: Any) -> Callable[[Any, Any], None]:
    """Puts something in a place of a dictionary, list or deque."""
    return partial(_kind_of(container).__setitem__, container)


def put_back_content(container: Any, before: Any) -> None:
    """Makes it hold `before`, what `content_of` has told, if it does not."""
    if _are_same(content_of(container), before):
        return
    kind = _kind_of(container)
    if isinstance(container, array):  # of which Python 3.11 clears none
        kind.__delitem__(container, slice(None))
    else:
        kind.clear(container)
    if isinstance(before, dict):
        for name, value in cast("dict[Any, Any]", before).items():
            kind.__setitem__(container, name, value)
    elif isinstance(before, set):
        kind.update(container, before)
    else:
        kind.extend(container, before)


def _kind_of(container: Any) -> Any:
    kind = type(container)
    return kind if kind in _KINDS else next(base for base in kind.__mro__ if base in _KINDS)


def _are_same(now: Any, before: Any) -> bool:
    """Whether the very same things are in both."""
    if len(now) != len(before):
        return False
    if isinstance(before, dict):
        pairs = zip(now.items(), before.items(), strict=True)
        return all(a[0] is b[0] and a[1] is b[1] for a, b in pairs)
    if isinstance(before, set):
        return all(item in now for item in before)
    return all(a is b for a, b in zip(now, before, strict=True))
