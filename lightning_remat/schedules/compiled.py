"""Compiled functions, and the types of what goes in and out of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Small: TypeAlias = NDArray[np.int32]
Flags: TypeAlias = NDArray[np.uint8 | np.bool_]
Floats: TypeAlias = NDArray[np.float64]

logger = logging.getLogger("lightning_remat")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def njit(function: _Function) -> _Function:
    """The function, compiled; the machine code is kept on disk where there is a place for it. Its type is unchanged."""
    return _kept(numba.njit(nogil=True)(function))


def njit_numpy(function: _Function) -> _Function:
    """The same with numpy's word for a division by zero, which lets loops run on several numbers at once."""
    return _kept(numba.njit(nogil=True, error_model="numpy")(function))


def _kept(compiled: Any) -> Any:
    try:
        compiled.enable_caching()
    except RuntimeError:  # numba's word for a folder of the package and one of the user that cannot be written to
        _tell_of_no_cache()
    return compiled


@cache
def _tell_of_no_cache() -> None:
    """Once: every compiled function is in the same case."""
    logger.warning(
        "neither the folder of lightning_remat nor the user's cache can be written to, so that every process compiles "
        "its planners anew, which takes up to a minute. Remedy: set NUMBA_CACHE_DIR to a folder that can"
    )
