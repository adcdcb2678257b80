"""Functions that the user has compiled run as compiled: TorchDynamo would look into them and have them run eagerly.

A compiled function, be it by `torch.compile` or by `torch.jit.script`, has other bits than its source, and often less
memory. A call of one divides the forward; a module that has one of the former as a method or attribute is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getattr_static
from types import FunctionType
from typing import Any, TypeGuard, cast

from torch import nn
from torch._dynamo import OptimizedModule
from torch._dynamo.variables import UserDefinedObjectVariable
from torch._dynamo.variables.functions import UserMethodVariable
from torch.jit import ScriptFunction

from .wrapped_calls import called_as_they_are, wrapper_of

_Scripted: Any = ScriptFunction
_SOURCE = "_torchdynamo_inline"
"""The attribute by which TorchDynamo finds what a compiled function was made of."""


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` has made the module of another, or compiles its calls.

    >>> import torch
    >>> is_compiled(torch.compile(nn.Identity())), is_compiled(nn.Identity())
    (True, False)
    """
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None  # pyright: ignore


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


def _is_compiled(function: object) -> TypeGuard[FunctionType]:
    return isinstance(function, FunctionType) and _SOURCE in vars(function)  # those of `torch.jit` are of another type


def _compiled(variable: Any) -> Callable[..., Any] | None:
    """The compiled function that TorchDynamo calls, or has replaced by its source."""
    if isinstance(variable, UserMethodVariable):  # of an object that is no module
        (holder,), function = variable.self_args(), cast(Any, variable).fn
        if not isinstance(holder.realize(), UserDefinedObjectVariable):
            return None
        written = getattr_static(holder.python_type(), getattr(function, "__name__", ""), None)
        return written if _is_compiled(written) and vars(written)[_SOURCE] is function else None
    wrapper = wrapper_of(variable)
    function: Any = wrapper.wrapper_obj
    is_found = wrapper.attr_to_trace == _SOURCE and (_is_compiled(function) or isinstance(function, _Scripted))
    return function if is_found else None


CHANGES = called_as_they_are(_compiled, "a compiled function is called:", UserMethodVariable)
