"""Calls of functions that wrap others, in whose place TorchDynamo calls what they wrap: made as they are on demand."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch._dynamo.variables.functions import WrapperUserFunctionVariable, WrapperUserMethodVariable

from .as_in_eager import is_captured_as_eager
from .divisions import divide_at, run_as_it_is
from .shared_setting import Exchange


def wrapper_of(variable: Any) -> Any:
    """What TorchDynamo has for the function itself, which a method has, too."""
    return variable if hasattr(variable, "wrapper_obj") else variable.fn


def called_as_they_are(find: Callable[[Any], Callable[..., Any] | None], reason: str, *kinds: type) -> list[Exchange]:
    """Has some functions called as they are, between two graphs.

    What calls a method runs as it is as a whole: TorchDynamo would call what is wrapped, and without its object.

    Args:
        find: Tells from what TorchDynamo has for a function whether it is one of these.
        reason: Why; ends in a colon.
        *kinds: What TorchDynamo may have for them, besides wrappers and methods that are such.
    """

    def unless_found(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def call_function(variable: Any, *args: Any, **kwargs: Any) -> Any:
            if is_captured_as_eager() and (found := find(variable)) is not None:
                name = str(getattr(found, "name", found.__qualname__))  # the first is what `torch.jit.script` tells
                if variable.self_args():
                    run_as_it_is(name, reason)
                divide_at(name, reason, "it is called as it is, between two graphs.")
            return call(variable, *args, **kwargs)

        return call_function

    candidates = (WrapperUserFunctionVariable, WrapperUserMethodVariable, *kinds)
    return [Exchange(kind, "call_function", unless_found) for kind in candidates if "call_function" in vars(kind)]
