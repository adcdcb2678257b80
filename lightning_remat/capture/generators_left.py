"""TorchDynamo leaves torch's generators where they are: what it sets them back to, other threads have drawn from since.

Capturing draws nothing from them: whatever would is an operation, or ends the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ..devices import modules_of_kinds
from .shared_setting import Exchange, captures_here


def _unless_by_dynamo(write: Callable[..., None]) -> Callable[..., None]:
    @wraps(write)
    def set_rng_state(*args: Any, **kwargs: Any) -> None:
        caller: str = sys._getframe(1).f_globals.get("__name__", "")  # pyright: ignore[reportPrivateUsage]
        if not (captures_here() and caller == "torch._dynamo.convert_frame"):
            write(*args, **kwargs)

    return set_rng_state


CHANGES = [Exchange(holder, "set_rng_state", _unless_by_dynamo) for holder in (torch.random, *modules_of_kinds())]
