"""What processes exchange in a forward is exchanged once, between two graphs.

A graph that is planned runs operations as often as it likes: each process times them by itself, and its schedule, made
of what it measured, runs others again. Exchanges would meet those that other operations of other processes make.
`nn.SyncBatchNorm` alone is captured, by calls of our own (see `synchronized_norms`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch._dynamo.variables import TorchInGraphFunctionVariable, UserFunctionVariable
from torch._dynamo.variables.functions import CollectiveFunctionRewriteVariable
from torch._ops import OpOverload, OpOverloadPacket

from ..module_state.own_exchanges import EXCHANGING
from .divisions import divide_at
from .shared_setting import Exchange, captures_here

# TorchDynamo's own names; nothing of them is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

_NAMESPACES = EXCHANGING | {"symm_mem", "_dtensor"}
"""Of operations of PyTorch that exchange."""

_MODULE = "torch.distributed.nn.functional"
"""Of functions that exchange with gradients, which raise where they are captured."""


def _exchanges(variable: Any) -> str | None:
    """The name of a function that exchanges, of what TorchDynamo has for it."""
    if isinstance(variable, CollectiveFunctionRewriteVariable):  # it would put an operation in its place
        return variable.get_function().__qualname__
    if isinstance(variable, UserFunctionVariable):
        function = variable.get_function()
        return function.__qualname__ if getattr(function, "__module__", None) == _MODULE else None
    called = variable.value
    packet = called.overloadpacket if isinstance(called, OpOverload) else called
    if isinstance(packet, OpOverloadPacket) and packet._qualified_op_name.partition("::")[0] in _NAMESPACES:
        return packet.__name__
    return None


def _divided(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def call_function(variable: Any, *args: Any, **kwargs: Any) -> Any:
        if captures_here() and (name := _exchanges(variable)) is not None:
            divide_at(name, "processes exchange data:", "they do so once, between two graphs.")
        return call(variable, *args, **kwargs)

    return call_function


_KINDS = (CollectiveFunctionRewriteVariable, UserFunctionVariable, TorchInGraphFunctionVariable)

CHANGES = [Exchange(kind, "call_function", _divided) for kind in _KINDS]
