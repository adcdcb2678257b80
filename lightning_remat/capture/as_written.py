"""What TorchDynamo would compute otherwise than Python and PyTorch do, without a word, or could not have recomputed.

Python's `max` and `min` choose one of their arguments, by its value: the others get no gradient, and a number stays a
number. TorchDynamo has `torch.maximum` or `torch.clamp` in their place, where the others get zeros and equal ones half
each; so such a call divides the forward. `torch.addcdiv` with a `value` would be three operations, with other bits.
Derivatives that are taken in a forward divide it, too: gradients by `torch.func` (`grad`, `vjp`, `jacrev`, `hessian`)
forbid the hooks of saved tensors that recomputations need, and a level of forward mode is over by then. A function that
writes an attribute of a class runs as it is: instances would go on to read what it was. So does what advances a
generator that was made before: TorchDynamo would make it anew in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import GeneratorType
from typing import Any

import torch
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import (
    BuiltinVariable,
    TensorVariable,
    TorchInGraphFunctionVariable,
    UserDefinedClassVariable,
)
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.ctx_manager import DualLevelContextManager, GradIncrementNestingCtxManagerVariable
from torch._dynamo.variables.tensor import UnspecializedPythonVariable

from .as_in_eager import is_captured_as_eager
from .divisions import divide_at, run_as_it_is
from .shared_setting import Exchange

# TorchDynamo's own names; nothing of them is typed.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false, reportUnknownVariableType=false


def _unless_of_tensors(choose: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(choose)
    def choose_one(builtin: Any, frame: Any, *values: Any) -> Any:
        if is_captured_as_eager() and any(map(_is_tensor, values)):
            divide_at(builtin.fn.__name__, f"Python's {builtin.fn.__name__} of tensors asks for their values:")
        return choose(builtin, frame, *values)

    return choose_one


def _is_tensor(value: Any) -> bool:
    """Whether TorchDynamo has a tensor there, and no number that it keeps in one."""
    value = None if value is None else value.realize()
    return isinstance(value, TensorVariable) and not isinstance(value, UnspecializedPythonVariable)


def _unless_a_derivative(enter: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(enter)
    def enter_transform(*args: Any) -> Any:
        if is_captured_as_eager():
            divide_at("torch.func", "a derivative that is taken there cannot be recomputed:")
        return enter(*args)

    return enter_transform


def _unless_of_a_class(place: int, store: Callable[..., Any]) -> Callable[..., Any]:
    """Args: the place of what is written to among the arguments; what writes."""

    @wraps(store)
    def store_attr(*args: Any, **kwargs: Any) -> Any:
        holder = args[place].realize()
        if isinstance(holder, UserDefinedClassVariable) and is_captured_as_eager():
            run_as_it_is(holder.value.__qualname__, "an attribute of a class is written:")
        return store(*args, **kwargs)

    return store_attr


def _unless_a_generator(wrap: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(wrap)
    def wrap_other(builder: VariableBuilder, value: Any) -> Any:
        if type(value) is GeneratorType and is_captured_as_eager():
            divide_at(value.__qualname__, "a generator that was made before is advanced:")
        return wrap(builder, value)

    return wrap_other


def _as_it_is(*_: Any, **__: Any) -> None:
    """What TorchDynamo may have in a function's place: nothing."""


CHANGES = [
    Exchange(BuiltinVariable, "_call_min_max_binary", _unless_of_tensors),
    Exchange(TorchInGraphFunctionVariable._get_handlers(), torch.addcdiv, lambda _: _as_it_is),
    Exchange(GradIncrementNestingCtxManagerVariable, "enter", _unless_a_derivative),
    Exchange(DualLevelContextManager, "enter", _unless_a_derivative),
    Exchange(SideEffects, "store_attr", partial(_unless_of_a_class, 1)),
    Exchange(VariableBuilder, "_wrap", _unless_a_generator),
]
if hasattr(BuiltinVariable, "call_setattr"):  # torch 2.11 knows classes to write to in no other way
    CHANGES.append(Exchange(BuiltinVariable, "call_setattr", partial(_unless_of_a_class, 2)))
