"""TorchDynamo leaves torch's generators where they are: what it sets them back to, other threads have drawn from since.

Capturing draws nothing from them: whatever would is an operation, or ends the graph.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from ..devices import modules_of_kinds
from .shared_setting import SharedSetting

_here = threading.local()


def _unless_by_dynamo(write: Callable[..., None]) -> Callable[..., None]:
    @wraps(write)
    def set_rng_state(*args: Any, **kwargs: Any) -> None:
        caller: str = sys._getframe(1).f_globals.get("__name__", "")  # pyright: ignore[reportPrivateUsage]
        if not (getattr(_here, "is_left", False) and caller == "torch._dynamo.convert_frame"):
            write(*args, **kwargs)

    return set_rng_state


_SETTINGS = [
    SharedSetting(holder, "set_rng_state", _unless_by_dynamo(holder.set_rng_state))
    for holder in (torch.random, *modules_of_kinds())
]


@contextmanager
def generators_left() -> Generator[None]:
    """So it is within the block, for what this thread captures; others that compile go on as before."""
    before, _here.is_left = getattr(_here, "is_left", False), True
    try:
        with ExitStack() as stack:
            for setting in _SETTINGS:
                stack.enter_context(setting.wanted())
            yield
    finally:
        _here.is_left = before
