"""Values that were changed in place between a forward and its backward: the error, and what buffers make of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")

_MOST_RETRIES = 8
"""Buffers that are found, one by one, to change between a forward and its backward."""


class ModifiedError(RuntimeError):
    """A backward would use a value other than its forward, as something was changed in place in between."""


def retried(run: Callable[[], T]) -> T:
    """What `run` returns, once more if a buffer was changed before the backward: from then on its value is copied."""
    for _ in range(_MOST_RETRIES):
        try:
            return run()
        except ModifiedError:
            continue
    return run()


def modified(what: str, version: int, tensor: Tensor) -> ModifiedError:
    """The error of a backward that would use a value other than its forward."""
    return ModifiedError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is at "
        f"version {tensor._version}, expected version {version}. Remedy: use the out-of-place operation, or run the "
        "backward before the change"
    )
