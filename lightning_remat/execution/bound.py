"""What a rewritten module has in place of its class's, and how whatever copies the module comes to run itself."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from torch import nn

STATE = "_rematerialization"
"""Under which name a module holds how it is rewritten."""

_REPLICATE, _GET_STATE = "_replicate_for_data_parallel", "__getstate__"
_BOUND = ("forward", _REPLICATE, _GET_STATE)

_CALL: types.CodeType = cast(Any, nn.Module)._call_impl.__code__
_CALLS = _CALL, *(c for c in _CALL.co_consts if isinstance(c, types.CodeType))
"""The code in which a module's forward is called, without hooks and with some; no set, as the hash of code is long."""


def bind(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Gives the module a forward of its own.

    It has the name and the arguments of that of the class, which trainers ask for what a batch must hold.
    """
    own = types.FunctionType(forward.__code__, forward.__globals__)
    module.forward = types.MethodType(
        wraps(type(module).forward, ("__name__", "__qualname__", "__doc__"), ())(own), module
    )
    vars(module)[_REPLICATE] = types.MethodType(_replicate_for_data_parallel, module)
    vars(module)[_GET_STATE] = types.MethodType(_plain_state, module)


def unbind(module: nn.Module) -> None:
    """Takes from the module what `bind` gave it."""
    for name in _BOUND:
        vars(module).pop(name, None)


def called(module: nn.Module, caller: types.FrameType) -> nn.Module:
    """Which module is called where the forward runs that was bound to this one.

    Clones as libraries for meta-learning make them (`clone.__dict__ = module.__dict__.copy()`) have the very same one.
    """
    return caller.f_locals["self"] if caller.f_code in _CALLS else module


def _plain_state(self: nn.Module) -> Any:
    """The state of a shallow copy and of a pickle: the plain module's, as what is bound here would run this module."""
    state = cast(Any, type(self)).__getstate__(self)
    if not isinstance(state, dict):
        return state
    named = cast(dict[str, Any], state)
    own = {name: value for name, value in named.items() if name in (STATE, *_BOUND)}
    return _State({name: value for name, value in named.items() if name not in own}, own)


class _State(dict[str, Any]):
    """The plain state of a rewritten module; a deep copy is rewritten like it."""

    def __init__(self, plain: dict[str, Any], own: dict[str, Any]) -> None:
        super().__init__(plain)
        self._own = own

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return copy.deepcopy({**self, **self._own}, memo)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
    """What `DataParallel` runs on each device: a shallow copy, whose forward must be its own."""
    replica = type(self)._replicate_for_data_parallel(self)  # pyright: ignore[reportPrivateUsage]
    bind(replica, cast(types.MethodType, self.forward).__func__)
    return replica
