"""Compiled functions, and the types of what goes in and out of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numba

# Arrays of int64, int32, uint8 and float64; numpy's stubs have no type for one element of an array.
Ints: TypeAlias = Any
Small: TypeAlias = Any
Flags: TypeAlias = Any
Floats: TypeAlias = Any

_Function = TypeVar("_Function", bound=Callable[..., Any])


def njit(function: _Function) -> _Function:
    """The function, compiled, the machine code kept on disk; its type is unchanged."""
    compiled: Any = numba.njit(cache=True, nogil=True)
    return compiled(function)
