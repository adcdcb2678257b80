"""Arguments that are neither tensors nor plain values: what a forward changes in them is seen, and undone."""

from __future__ import annotations

import enum
import types
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import TraceError
from ..module_state.python_state import PythonState

_ATOMS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, enum.Enum, slice, range)
_OPAQUE = (nn.Module, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
_DEPTH = 6


class ArgumentState:
    """The objects among the leaves of a call, and what they hold, to return to.

    Raises:
        TraceError: One holds tensors, which a trace would take for constants.
    """

    def __init__(self, leaves: Iterable[Any]) -> None:
        self._objects: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                self._visit(leaf, type(leaf).__name__, _DEPTH)
        self._state = PythonState.of({self._names[key]: holder for key, holder in self._objects.items()})

    def put_back(self) -> str | None:
        """Undoes every change; a description of the first one."""
        for name, attribute in self._state.put_back():
            return f"the attribute {attribute!r} of an argument of type {name.partition('#')[0]}"
        return None

    def _visit(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, Tensor):
            raise TraceError(
                f"an argument of type {name} holds tensors, which a trace would take for constants. Remedy: pass the "
                "tensors themselves, in tuples, lists, dicts or dataclasses"
            )
        if isinstance(value, (*_ATOMS, *_OPAQUE)) or id(value) in self._objects or not depth:
            return
        parts: list[Any]
        if isinstance(value, dict):
            parts = list(cast(dict[Any, Any], value).values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            parts = list(cast(Iterable[Any], value))
        elif hasattr(value, "__dict__"):
            parts = list(vars(cast(object, value)).values())
            self._names[id(value)] = f"{name}#{len(self._objects)}"
            self._objects[id(value)] = value
        else:
            return
        for part in parts:
            self._visit(part, name, depth - 1)
