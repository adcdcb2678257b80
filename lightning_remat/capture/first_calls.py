"""What models of transformers do in their first call alone, under a lock, which no graph can have: hooks are set.

A capture that meets it is made once more, when it is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch._dynamo.variables import UserFunctionVariable

from .as_in_eager import is_captured_as_eager
from .shared_setting import Exchange

# TorchDynamo's own names; nothing of them is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

_SETS_HOOKS = "transformers.utils.output_capturing", "maybe_install_capturing_hooks"

_HAS_THEM = "_output_capturing_hooks_installed"


class _Local(threading.local):
    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []


_local = _Local()


def _noted(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def call_function(variable: Any, frame: Any, args: Any, kwargs: Any) -> Any:
        function = variable.fn
        if (function.__module__, function.__name__) == _SETS_HOOKS and is_captured_as_eager():
            model = args[0].realize().value
            if not getattr(model, _HAS_THEM, False):
                _local.waiting.append(lambda: function(model))
        return call(variable, frame, args, kwargs)

    return call_function


def are_made() -> bool:
    """Does what the last capture of this thread has met; whether there was anything."""
    waiting, _local.waiting = _local.waiting, []
    for first_call in waiting:
        first_call()
    return bool(waiting)


CHANGES = [Exchange(UserFunctionVariable, "call_function", _noted)]
