"""Functions that the user has compiled run as compiled: TorchDynamo would look into them and have them run eagerly.

A compiled function has other bits than its source, and often less memory. A call of one divides the forward; a module
that has one as a method or attribute is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

from torch import nn
from torch._dynamo.variables.functions import WrapperUserFunctionVariable

from .as_in_eager import divide_at, is_captured_as_eager
from .shared_setting import Exchange, captures_here

_SOURCE = "_torchdynamo_inline"
"""The attribute by which TorchDynamo finds what a compiled function was made of."""


def has_compiled_methods(module: nn.Module) -> bool:
    """Whether `torch.compile` has made a method of the module, its forward or another, or a function that it holds.

    Of the latter torch 2.11 keeps no trace while it captures.

    >>> import torch
    >>> class Compiled(nn.Identity):
    ...     forward = torch.compile(nn.Identity.forward)
    >>> has_compiled_methods(Compiled()), has_compiled_methods(nn.Identity())
    (True, False)
    """
    own = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module)
    return any(_is_compiled(value) for holder in (module, *own) for value in vars(holder).values())


def _is_compiled(function: object) -> bool:
    return isinstance(function, FunctionType) and _SOURCE in vars(function)  # those of `torch.jit` are of another type


def _unless_compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def call_function(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        is_compiled = wrapper.attr_to_trace == _SOURCE and _is_compiled(wrapper.wrapper_obj)
        if is_compiled and captures_here() and is_captured_as_eager():
            reason = "a function that torch.compile has compiled is called:"
            divide_at(wrapper.wrapper_obj.__qualname__, reason, "it runs as compiled, between two graphs.")
        return call(wrapper, *args, **kwargs)

    return call_function


CHANGES = [Exchange(WrapperUserFunctionVariable, "call_function", _unless_compiled)]
