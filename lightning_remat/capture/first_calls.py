"""What models of transformers do in their first call alone, under a lock, which no graph can have: hooks are set.

A capture that meets it is made once more, when that is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
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
    met: list[Callable[[], object]] | None = None


_local = _Local()


@contextmanager
def met() -> Generator[list[Callable[[], object]]]:
    """What captures of this thread meet inside, to be done before they are made once more."""
    before, _local.met = _local.met, []
    try:
        yield _local.met
    finally:
        _local.met = before


def _noted(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def call_function(variable: Any, frame: Any, args: Any, kwargs: Any) -> Any:
        function = variable.fn
        is_one = (function.__module__, function.__name__) == _SETS_HOOKS
        if is_one and _local.met is not None and is_captured_as_eager():
            model = args[0].realize().value
            if not getattr(model, _HAS_THEM, False):
                _local.met.append(lambda: function(model))
        return call(variable, frame, args, kwargs)

    return call_function


CHANGES = [Exchange(UserFunctionVariable, "call_function", _noted)]
