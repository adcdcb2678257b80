"""Iterators that a module holds: where they are is put back where that can be, and told where it cannot."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from collections.abc import Callable
from typing import Any, cast

from torch import nn

_Count: Any = itertools.count
_SEQUENCES: Any = ([], (), range(0), range(2**70), "", b"", bytearray())
_WITH_PLACE: tuple[Any, ...] = (*(cast(Any, type(iter(some))) for some in _SEQUENCES),)
"""Those that tell their place, and can be set to it."""


def iterators_undo(module: nn.Module) -> Callable[[], None]:
    """Puts back the places of the iterators among a module's attributes; warns of those of which nobody knows them.

    >>> from torch import nn
    >>> module = nn.Identity()
    >>> module.numbers, module.names = itertools.count(3), iter(["a", "b", "c"])
    >>> put_back = iterators_undo(module)
    >>> next(module.numbers), next(module.names), next(module.names)
    (3, 'a', 'b')
    >>> put_back()
    >>> next(module.numbers), next(module.names)
    (3, 'a')
    """
    places: list[tuple[Any, Any]] = []
    counts: list[tuple[str, Any, Any]] = []
    state: dict[str, Any] = vars(module)
    for name, value in state.items():
        if isinstance(value, _WITH_PLACE):
            if len(found := value.__reduce__()) == 3:
                places.append((value, found[2]))
        elif isinstance(value, _Count):
            counts.append((name, value, copy.copy(value)))
        elif hasattr(cast(Any, type(value)), "__next__") and not isinstance(value, io.IOBase):
            warnings.warn(
                f"{type(module).__name__} holds an iterator, {name}: steps that are tried while it is planned advance "
                "it, and nobody can put it back. Remedy: make it anew afterwards",
                stacklevel=2,
            )

    def put_back() -> None:
        for iterator, place in places:
            iterator.__setstate__(place)
        state.update({name: twin for name, count, twin in counts if repr(count) != repr(twin)})

    return put_back
