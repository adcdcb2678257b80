"""What a forward learns when it asks whether it is compiled: what is captured must be what runs without a capture.

Libraries compute otherwise under `torch.compile`: a scan in place of a loop, a mask in place of a look at its values.
The results differ in bits, so whoever asks with tensors or modules at hand is told that nothing is compiled. Who has
none is told the truth, as it only avoids what cannot be captured, a context variable; so is who warns, and so is
PyTorch's own code, whose other ways are often the only ones that can be captured.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, _jit_internal, nn
from torch._dynamo import external_utils, trace_rules
from torch._dynamo.exc import raise_observed_exception
from torch._dynamo.variables import (
    ConstantVariable,
    LazyVariableTracker,
    NNModuleVariable,
    TensorVariable,
    TorchInGraphFunctionVariable,
    UnspecializedNNModuleVariable,
    UserFunctionVariable,
)
from torch._subclasses.fake_tensor import FakeTensor

from ..devices import modules_of_kinds
from .divisions import callers, name_of_file
from .shared_setting import Deferred, Exchange, OnlyHere, captures_here

# TorchDynamo's own names; nothing of them is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportDeprecated=false

_TOLD_THE_TRUTH = ("torch", __name__.partition(".")[0])
"""Packages; this one's forward steps aside where it is compiled."""

_QUESTIONS: tuple[Any, ...] = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch._utils.is_compiling,
    external_utils.is_compiling,
)

_STREAM_QUESTIONS: list[Any] = [
    question
    for module in modules_of_kinds()
    if (question := getattr(module, "is_current_stream_capturing", None)) is not None
]
"""Others: libraries take them for one with those above. TorchDynamo stops at them unless it may ask them; torch 2.11
asks, and stops where it is built for a device that is not there."""

_TYPE_QUESTIONS: tuple[Any, ...] = (
    torch.jit.isinstance,
    _jit_internal._isinstance,
    _jit_internal.container_checker,
    _jit_internal.check_args_exist,
    _jit_internal.check_empty_containers,
)
"""TorchScript's way to ask for a type, which TorchDynamo is told to stop at; it captures what is written there."""

_here = threading.local()

NOTE_FOR_COMPILERS: Any = torch._dynamo.mark_static_address
"""What only code that is not compiled calls, to tell a compiler something: nothing to compute, so it is left out."""


@contextmanager
def as_in_eager(tensors: Iterable[Tensor]) -> Generator[None]:
    """What this thread captures inside, of a forward with these tensors, is answered so.

    On fake tensors the truth is told: they have no values that libraries might look at in place of compiling.
    """
    before = getattr(_here, "is_hidden", False)
    _here.is_hidden = not any(isinstance(t, FakeTensor) for t in tensors)
    try:
        yield
    finally:
        _here.is_hidden = before


def is_captured_as_eager() -> bool:
    """Whether what this thread captures now is answered so: others that compile are not concerned."""
    return getattr(_here, "is_hidden", False)


def _answer(truth: Callable[..., Any], variable: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
    """The value of a question in a frame that is captured."""
    if is_captured_as_eager() and _may_compute(frame):
        return ConstantVariable.create(False)
    return truth(variable, frame, *args, **kwargs)


def _about_exports(truth: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """No capture of ours is an export; torch until 2.13 says of every capture that it is one."""
    return ConstantVariable.create(False) if captures_here() else truth(*args, **kwargs)


def _about_streams(variable: Any, frame: Any) -> Any:
    try:
        return ConstantVariable.create(variable.value())
    except RuntimeError:  # of a PyTorch without such devices, which libraries expect
        raise_observed_exception(RuntimeError, frame)


def _may_compute(frame: Any) -> bool:
    """Whether the function that asks has tensors or modules at hand; where it is given nothing, the one that calls it.

    Args:
        frame: TorchDynamo's, of the function.
    """
    if any(caller.f_code.co_name.startswith("warn") for caller in callers(frame)):
        return False
    for asking in callers(frame):
        if name_of_file(asking).partition(".")[0] in _TOLD_THE_TRUTH:
            return False
        names = inspect.getargs(asking.f_code)
        given = [asking.symbolic_locals.get(name) for name in (*names.args, names.varargs, names.varkw)]
        if any(not _is_nothing(value) for value in given):
            return _has_tensors_or_modules(asking.symbolic_locals.values())
    return True


def _is_nothing(value: Any) -> bool:
    """Whether an argument is absent, None or an empty container."""
    if value is None:
        return True
    if isinstance(value, LazyVariableTracker) and not value.is_realized():
        return value.peek_value() is None
    value = value.unwrap()
    return (isinstance(value, ConstantVariable) and value.value is None) or vars(value).get("items") in ([], (), {})


def _has_tensors_or_modules(values: Iterable[Any]) -> bool:
    """Of what TorchDynamo has in the place of values, those in containers included."""
    for value in values:
        if isinstance(value, LazyVariableTracker):
            if not value.is_realized():
                if issubclass(value.peek_type(), (Tensor, nn.Module)):
                    return True
                continue
            value = value.unwrap()
        if isinstance(value, (TensorVariable, NNModuleVariable, UnspecializedNNModuleVariable)):
            return True
        items = vars(value).get("items")
        items = items.values() if isinstance(items, dict) else items if isinstance(items, (list, tuple)) else ()
        if _has_tensors_or_modules(items):
            return True
    return False


def _is_allowed(truth: Callable[[object], bool], function: object) -> bool:
    """Whether TorchDynamo may ask a function while it captures."""
    return truth(function) or (captures_here() and any(function is question for question in _STREAM_QUESTIONS))


def _captured_as_written(question: Any) -> Exchange:
    return Exchange(trace_rules.get_torch_obj_rule_map(), question, lambda _: UserFunctionVariable)


_HANDLERS = TorchInGraphFunctionVariable._get_handlers()

CHANGES = [
    *(Exchange(_HANDLERS, question, partial(partial, _answer)) for question in _QUESTIONS),
    Exchange(_HANDLERS, torch.compiler.is_exporting, partial(partial, _about_exports)),
    *(Exchange(_HANDLERS, question, lambda _: _about_streams) for question in _STREAM_QUESTIONS),
    # PyTorch forgets these rules, and makes them anew, where a process group is destroyed.
    *(Deferred(partial(_captured_as_written, question)) for question in _TYPE_QUESTIONS),
    Exchange(trace_rules, "is_callable_allowed", partial(partial, _is_allowed)),
    # Else TorchDynamo fails where it meets it.
    Exchange(NOTE_FOR_COMPILERS, "_dynamo_forbidden", partial(OnlyHere, here=False)),
]
