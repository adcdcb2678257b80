"""Compiled functions, and the types of what goes in and out of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakSet

import numba
import numpy as np
from numba.core import config, event
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Small: TypeAlias = NDArray[np.int32]
Flags: TypeAlias = NDArray[np.uint8 | np.bool_]
Floats: TypeAlias = NDArray[np.float64]

logger = logging.getLogger("lightning_remat")

_njit: Any = partial(cast(Any, numba).njit, nogil=True, no_cfunc_wrapper=True)
"""Nobody calls these from C: without the entries for that, an option that the stubs do not know, less is compiled."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def njit(function: _Function) -> _Function:
    """The function, compiled; the machine code is kept on disk where there is a place for it. Its type is unchanged."""
    return _kept(_njit()(function))


def njit_numpy(function: _Function) -> _Function:
    """The same with numpy's word for a division by zero, which lets loops run on several numbers at once."""
    return _kept(_njit(error_model="numpy")(function))


class _Teller(event.Listener):
    """Tells, once, why nothing is to be seen for a while: numba compiles one of these functions."""

    def __init__(self) -> None:
        self._ours: WeakSet[Any] = WeakSet()

    def on_start(self, event: Any) -> None:
        """A function is compiled, which was not found on disk."""
        if event.data["dispatcher"] in self._ours:
            _tell_of_compiling()

    def on_end(self, event: Any) -> None:
        """It is done."""

    def tell_of(self, compiled: Any) -> None:
        """Of this function, too."""
        self._ours.add(compiled)


_TELLER = _Teller()
cast(Any, event).register("numba:compile", _TELLER)


def _kept(compiled: Any) -> Any:
    if cast(Any, config).DISABLE_JIT:  # it is the function itself
        return compiled
    _TELLER.tell_of(compiled)
    try:
        compiled.enable_caching()
    except RuntimeError:  # numba's word for a folder of the package and one of the user that cannot be written to
        _tell_of_no_cache()
    return compiled


@cache
def _tell_of_compiling() -> None:
    """Of all functions together: one by one they are compiled as they are needed."""
    logger.warning("lightning_remat compiles its planners, as always after it was installed: a minute or two, once")


@cache
def _tell_of_no_cache() -> None:
    """Once: every compiled function is in the same case."""
    logger.warning(
        "neither the folder of lightning_remat nor the user's cache can be written to, so that every process compiles "
        "its planners anew, which takes a minute or two. Remedy: set NUMBA_CACHE_DIR to a folder that can"
    )
