"""How what an object holds is put back in place: tensors, arrays, generators, containers, modules, plain objects.

What a function holds is what its code reaches: its closure, its attributes and defaults, and of code that nobody has
installed the globals that it names, and the attributes of classes.
"""

from __future__ import annotations

import ctypes
import io
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from multiprocessing.sharedctypes import SynchronizedBase
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .batches import record_histories
from .containers import content_of, put_back_content
from .iterators import iterators_undo
from .own_code import global_names, is_own_code
from .plain_objects import LEFT_ALONE, is_plain
from .random_state import RandomState, generator_of
from .sharding import local_part

# What users' objects hold has no types.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

Undo = Callable[[], None]

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, ModuleType, torch.dtype)

_CONTAINERS = (dict, list, set, deque, tuple, bytearray, array)
"""Objects of these types have no attributes beside; those of users' classes of them may."""

_RECORDED = (torch.strided, torch.sparse_coo)
"""Layouts of tensors whose values are put back."""

_ABSENT = object()

_C_DATA: tuple[Any, ...] = (ctypes.c_int.__base__, ctypes.Array, ctypes.Structure)

_Cached: Any = type(lru_cache(lambda: None))

_OUTSIDE_STEPS = ("prepare_data", *(f"{stage}_dataloader" for stage in ("train", "val", "test", "predict")))
"""Methods that make data, and may name much of it."""


class Recorder:
    """Records what objects hold, each object once.

    An object is put back after what it holds: a buffer that was exchanged is the recorded one again, and has its value.

    Args:
        with_parameters: Whether the values of parameters are recorded.
        with_gradients: Whether their gradients are.
        with_tensors: Whether the contents of other tensors and of arrays are.

    Attributes:
        undo: What puts back all that was added; each is to run, the last one first.
    """

    def __init__(self, with_parameters: bool = True, with_gradients: bool = True, with_tensors: bool = True) -> None:
        self.with_parameters, self.with_gradients, self.with_tensors = with_parameters, with_gradients, with_tensors
        self.undo: list[Undo] = []
        self._seen: dict[int, Any] = {}  # id → the object, which keeps the id its own
        self._iterators: dict[int, Any] = {}
        self._slots: dict[type, list[str]] = {}

    def add_module(self, root: nn.Module) -> None:
        """The module and its submodules: parameters, gradients, buffers, attributes."""
        for module in root.modules():
            if self._is_new(module):
                for parameter in module.parameters(recurse=False):
                    self._add_parameter(parameter)
                self.undo.append(iterators_undo(vars(module), self._iterators))
                self._add_attributes(module)

    def add_holder(self, holder: Any) -> None:
        """The attributes of an object, whatever it is."""
        if self._is_new(holder):
            self._add_attributes(holder)

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def _add(self, value: Any) -> None:
        """Whatever an attribute or container holds."""
        if isinstance(value, _IMMUTABLE) or not self._is_new(value):
            return
        if isinstance(value, nn.Parameter):
            self._seen.pop(id(value))
            self._add_parameter(value)
        elif isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, nn.Module):
            self._seen.pop(id(value))
            self.add_module(value)
        elif isinstance(value, np.ndarray):
            self._add_array(value)
        elif isinstance(value, _CONTAINERS):
            self._add_container(value)
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, (MethodType, BuiltinMethodType)):
            self._add_all((value.__self__, getattr(value, "__func__", None)))
        elif isinstance(value, partial):
            self._add_all((value.func, value.args, value.keywords))
        elif isinstance(value, property):
            self._add_all((value.fget, value.fset, value.fdel))
        elif isinstance(value, (staticmethod, classmethod, _Cached)):
            self._add(value.__wrapped__)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(shared := _shared_memory(value), _C_DATA):
            self.undo.append(partial(_put_back_memory, shared, bytes(shared)))
        elif isinstance(value, (io.StringIO, io.BytesIO)):
            self.undo.append(partial(_put_back_text, value, value.getvalue(), value.tell()))
        elif (source := generator_of(value)) is not None:
            self.undo.append(RandomState([source]).put_back)
        elif is_plain(value):
            if isinstance(state := getattr(value, "__dict__", None), dict):
                self.undo.append(iterators_undo(state, self._iterators))
            self._add_attributes(value)
        else:
            self._seen.pop(id(value))  # it may be added as a holder yet

    def _add_attributes(self, holder: Any) -> None:
        state = getattr(holder, "__dict__", None)
        if isinstance(state, dict):
            content = content_of(state)
            self.undo.append(partial(put_back_content, state, content))
            self._add_all(content.values())
        kind = type(holder)
        if kind not in self._slots:
            self._slots[kind] = _slots(kind)
        for name in self._slots[kind]:
            value = getattr(holder, name, _ABSENT)
            self.undo.append(partial(_put_back_slot, holder, name, value))
            self._add(value)
        self._add(kind)

    def _add_class(self, kind: type) -> None:
        """What classes hold that are written for this run: counts of instances, registries."""
        if is_own_code(kind):
            before = {k: v for k, v in vars(kind).items() if not k.startswith("__") and k not in _OUTSIDE_STEPS}
            self._add_names(vars(kind), before, partial(setattr, kind), partial(delattr, kind))
        self._add_all(kind.__bases__)

    def _add_function(self, function: FunctionType) -> None:
        if str(function.__module__).partition(".")[0] in LEFT_ALONE:  # of generated code it is None
            return
        for cell in function.__closure__ or ():
            self._add_cell(cell)
        self._add_all((vars(function), function.__defaults__, function.__kwdefaults__))
        if is_own_code(function):
            space = function.__globals__
            before = {name: space.get(name, _ABSENT) for name in global_names(function.__code__)}
            self._add_names(space, before, space.__setitem__, space.__delitem__)

    def _add_names(
        self,
        names: Mapping[str, Any],
        before: Mapping[str, Any],
        write: Callable[[str, Any], object],
        remove: Callable[[str], object],
    ) -> None:
        """Some of the names of a class or a file, which are bound to something or `_ABSENT`."""

        def put_back() -> None:
            for name, value in before.items():
                if names.get(name, _ABSENT) is not value:
                    remove(name) if value is _ABSENT else write(name, value)

        self.undo.append(put_back)
        self._add_all(before.values())

    def _add_cell(self, cell: CellType) -> None:
        if not self._is_new(cell):
            return
        value = _content(cell)
        self.undo.append(partial(_put_back_content, cell, value))
        self._add(value)

    def _add_all(self, values: Iterable[Any]) -> None:
        for value in list(values):
            self._add(value)

    def _add_container(self, container: Any) -> None:
        if isinstance(container, tuple):
            self._add_all(tuple.__iter__(cast("tuple[Any, ...]", container)))  # whatever length a subclass tells
        else:
            self._add_content(container)
        if type(container) not in _CONTAINERS:
            self._add_attributes(container)

    def _add_content(self, container: Any) -> None:
        if isinstance(container, dict) and dict.__contains__(container, "__builtins__"):
            # A file's names, to which captures add theirs.
            own = {name: value for name, value in content_of(container).items() if not str(name).startswith("__")}
            self._add_names(container, own, container.__setitem__, container.__delitem__)
            return
        if isinstance(container, (dict, list, deque)):
            self.undo.append(iterators_undo(cast("dict[Any, Any]", container), self._iterators))
        content = content_of(container)
        self.undo.append(partial(put_back_content, container, content))
        if not isinstance(container, (bytearray, array)):
            self._add_all(content.values() if isinstance(content, dict) else content)

    def _add_parameter(self, parameter: nn.Parameter) -> None:
        if not self._is_new(parameter):
            return
        self._add_all(getattr(parameter, hooks, None) for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"))
        if self.with_parameters:
            requires_grad = parameter.requires_grad
            self.undo.append(lambda: cast(None, parameter.requires_grad_(requires_grad)))
        self._add_parts(parameter, with_value=self.with_parameters)
        if self.with_gradients:
            grad = parameter.grad
            if grad is not None and self._is_new(grad):
                self._add_parts(grad, with_value=True)
            self.undo.append(lambda: setattr(parameter, "grad", grad))

    def _add_tensor(self, tensor: Tensor) -> None:
        is_recorded = self.with_tensors and tensor.layout in _RECORDED and not tensor.is_inference()
        self._add_parts(tensor, with_value=is_recorded)

    def _add_parts(self, tensor: Tensor, *, with_value: bool) -> None:
        """The value of a tensor and its attributes, which are where one that wraps others has them."""
        wrapped = set[str]()
        if is_traceable_wrapper_subclass(tensor) and local_part(tensor) is tensor:
            wrapped = {*tensor.__tensor_flatten__()[0]}
        if with_value and not wrapped:
            self.undo.append(_value_undo(tensor))
        if not isinstance(tensor, FakeTensor):  # which has others of its own
            attributes = vars(tensor)
            self.undo.append(partial(put_back_content, attributes, dict(attributes)))
            self._add_all(value for name, value in attributes.items() if with_value or name not in wrapped)

    def _add_array(self, values: np.ndarray[Any, Any]) -> None:
        if values.dtype == object:
            self._add_all(values.flat)
        if self.with_tensors and values.flags.writeable and not isinstance(values, np.memmap):  # a file
            before = values.copy()
            self.undo.append(lambda: np.copyto(values, before))


def _shared_memory(value: Any) -> Any:
    """What processes share in it, as `multiprocessing.Value` does; itself, where it says nothing of that."""
    return value.get_obj() if isinstance(value, SynchronizedBase) else value


def _put_back_memory(shared: Any, content: bytes) -> None:
    ctypes.memmove(ctypes.addressof(shared), content, len(content))


def _put_back_text(file: Any, content: Any, place: int) -> None:
    if not file.closed:
        file.seek(0)
        file.truncate()
        file.write(content)
        file.seek(place)


def _put_back_slot(holder: Any, name: str, value: Any) -> None:
    if value is not _ABSENT:
        object.__setattr__(holder, name, value)
    elif hasattr(holder, name):
        object.__delattr__(holder, name)


def _content(cell: CellType) -> Any:
    """What a variable of a closure is bound to; nothing yet, or no more, where it is `_ABSENT`."""
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _put_back_content(cell: CellType, value: Any) -> None:
    if value is not _ABSENT:
        cell.cell_contents = value
    elif _content(cell) is not _ABSENT:
        del cell.cell_contents


def _value_undo(tensor: Tensor) -> Undo:
    detached = tensor.detach()
    if isinstance(local_part(tensor), FakeTensor):  # which has no values
        return lambda: None if tensor.shape == detached.shape else cast(Any, tensor).set_(detached)
    value = detached.clone() if tensor.layout is not torch.strided else detached.to("cpu", copy=True)
    cut = record_histories([tensor])

    def put_back() -> None:
        cut()
        if tensor.layout is not torch.strided:
            tensor.copy_(value)  # what it is made of is exchanged
        elif tensor.shape == value.shape:
            tensor.detach().copy_(value)
        else:
            cast(Any, tensor).set_(value.to(tensor.device))

    return put_back


def _slots(kind: type) -> list[str]:
    """Names of the attributes that instances hold outside their `__dict__`."""
    found: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names = [slots] if isinstance(slots, str) else list(slots)
        found += [n for n in names if n not in ("__dict__", "__weakref__") and not n.startswith("__")]
    return found
