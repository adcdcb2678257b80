"""TorchDynamo leaves random generators where they are.

What it sets torch's back to, other threads have drawn from since. Capturing draws nothing from them: whatever would is
an operation, or ends the graph. A generator of Python that a module has of its own it would copy: every call would draw
what the first one drew, so that a draw from it divides the forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.misc import RandomVariable

from ..devices import modules_of_kinds
from .divisions import divide_at
from .shared_setting import Exchange, captures_here


def _unless_by_dynamo(write: Callable[..., None]) -> Callable[..., None]:
    @wraps(write)
    def set_rng_state(*args: Any, **kwargs: Any) -> None:
        caller: str = sys._getframe(1).f_globals.get("__name__", "")  # pyright: ignore[reportPrivateUsage]
        if not (captures_here() and caller == "torch._dynamo.convert_frame"):
            write(*args, **kwargs)

    return set_rng_state


def _unless_drawn_from(mutation: Callable[..., None]) -> Callable[..., None]:
    @wraps(mutation)
    def noted(effects: SideEffects, changed: Any) -> None:
        if captures_here() and isinstance(changed, RandomVariable) and changed.source is not None:
            reason = "a generator of the module's own is drawn from:"
            divide_at("random.Random", reason, "what TorchDynamo draws is the same in every call.")
        mutation(effects, changed)

    return noted


CHANGES = [
    *(Exchange(holder, "set_rng_state", _unless_by_dynamo) for holder in (torch.random, *modules_of_kinds())),
    Exchange(SideEffects, "mutation", _unless_drawn_from),
]
