"""Functions of numpy in a forward: TorchDynamo would let torch compute them, with other sums and other random numbers.

Numbers that are made of constants alone are taken from numpy itself; everything else divides the forward there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any, NoReturn

import numpy as np
from torch._dynamo.variables import ConstantVariable, NumpyNdarrayVariable, NumpyVariable

from .as_in_eager import is_captured_as_eager
from .divisions import divide_at
from .shared_setting import Exchange

# TorchDynamo's own names; nothing of them is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

_OF_CONSTANTS = (np.prod, np.sum, np.mean, np.max, np.min, np.round)
"""Of numpy's functions, beside those that take single numbers, what sizes and settings are computed with."""

_MOVES = ("__len__", "__iter__", "__getitem__", "size", "astype", "copy", "reshape", "transpose")
"""Methods of arrays that compute nothing."""


def _call_function(truth: Callable[..., Any], function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    """What a function of numpy returns in a frame that is captured."""
    if not is_captured_as_eager():
        return truth(function, frame, args, kwargs)
    is_known = isinstance(function.value, np.ufunc) or function.value in _OF_CONSTANTS
    if is_known and all(value.is_python_constant() for value in (*args, *kwargs.values())):
        named = {name: value.as_python_constant() for name, value in kwargs.items()}
        made = function.value(*(value.as_python_constant() for value in args), **named)
        if isinstance(made, (np.bool_, np.integer, np.float64)):
            return ConstantVariable.create(made.item())
    _divide_at(f"numpy.{getattr(function.value, '__name__', function.value)}")


def _call_method(truth: Callable[..., Any], array: Any, frame: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What a method of an array of numpy's returns in a frame that is captured."""
    if is_captured_as_eager() and name not in _MOVES:
        _divide_at(f"numpy.ndarray.{name}")
    return truth(array, frame, name, args, kwargs)


def _divide_at(what: str) -> NoReturn:
    divide_at(what, f"{what} has other bits in torch:")


def _answered(self: Any, answer: Callable[..., Any], truth: Callable[..., Any], *args: Any) -> Any:
    return answer(truth, self, *args)


CHANGES = [
    Exchange(kind, method, partial(partialmethod, _answered, answer))
    for kind, method, answer in (
        (NumpyVariable, "call_function", _call_function),
        (NumpyNdarrayVariable, "call_method", _call_method),
    )
]
