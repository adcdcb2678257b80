"""Functions that take what another one takes, whose parameters people and their tools see."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec

P = ParamSpec("P")


def taking(source: Callable[P, Any]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Gives a method the parameters of `source`, after its own first: for `help`, type checkers and LightningCLI."""

    def decorate(method: Callable[..., None]) -> Callable[..., None]:
        first = next(iter(inspect.signature(method).parameters.values()))
        parameters = inspect.signature(source, eval_str=True).parameters
        signature = inspect.Signature([first, *parameters.values()], return_annotation=None)

        @wraps(method)
        def checked(*args: Any, **kwargs: Any) -> None:
            signature.bind(*args, **kwargs)  # else an error would name the other function
            method(*args, **kwargs)

        vars(checked)["__signature__"] = signature
        checked.__annotations__ = {name: p.annotation for name, p in parameters.items()} | {"return": None}
        return checked

    return decorate
