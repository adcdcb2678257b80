"""Calls of functions that wrap others, in whose place TorchDynamo calls what they wrap: made as they are on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch._dynamo.variables.functions import WrapperUserFunctionVariable, WrapperUserMethodVariable

from .divisions import divide_at, run_as_it_is
from .shared_setting import Exchange


def wrapper_of(variable: Any) -> Any:
    """What TorchDynamo has for the function itself, which a method has, too."""
    return variable if hasattr(variable, "wrapper_obj") else variable.fn


def call_as_it_is(variable: Any, what: str, reason: str) -> NoReturn:
    """Has a function called as it is, between two graphs.

    What calls a method runs as it is as a whole: TorchDynamo would call what is wrapped, and without its object.

    Args:
        variable: What TorchDynamo has for the function.
        what: Its name.
        reason: Why; ends in a colon.
    """
    if variable.self_args():
        run_as_it_is(what, reason)
    divide_at(what, reason, "it is called as it is, between two graphs.")


def calls_exchanged(exchange: Callable[[Callable[..., Any]], Callable[..., Any]], *kinds: type) -> list[Exchange]:
    """Of how wrappers are called, those of methods among them, and what else is called."""
    candidates = (WrapperUserFunctionVariable, WrapperUserMethodVariable, *kinds)
    return [Exchange(kind, "call_function", exchange) for kind in candidates if "call_function" in vars(kind)]
