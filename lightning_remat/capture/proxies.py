"""What stands for a tensor, or for what is derived from one, while a module is traced."""

# A proxy stands for a value of any type.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import builtins
import operator
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.fx.proxy import Attribute, Proxy


class DecidingTracer(Protocol):
    """What a proxy asks its tracer."""

    def decided(self, proxy: Proxy, kind: Callable[[Any], Any]) -> Any:
        """`kind` of the value on the example inputs, on which the trace depends from here on."""
        ...

    def class_of(self, proxy: Proxy) -> type:
        """The class of the value."""
        ...

    def has_attribute(self, proxy: Proxy, name: str) -> bool:
        """Whether the value has an attribute."""
        ...

    def create_proxy(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy:
        """The proxy of a new node."""
        ...


class ValueProxy(Proxy):
    """A proxy that passes for its value.

    `x += y` and `x[i] = y` are recorded as the in-place operations that they are. `len`, `int`,
    iteration and conditions are answered by the value on the example inputs, `isinstance` inside `instances_of_values`.
    """

    tracer: DecidingTracer  # pyright: ignore[reportIncompatibleVariableOverride]

    def __getattr__(self, k: str) -> Attribute:
        if not hasattr(Tensor, k) and not self.tracer.has_attribute(self, k):
            raise AttributeError(f"{self.tracer.class_of(self).__name__!r} object has no attribute {k!r}")
        return ValueAttribute(self, k)

    @classmethod
    def __torch_function__(cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None) -> Any:
        return Proxy.__torch_function__.__func__(Proxy, orig_method, types, args, kwargs)  # pyright: ignore

    def __iadd__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __isub__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.isub, (self, other), {})

    def __imul__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})

    def __itruediv__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.itruediv, (self, other), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __len__(self) -> int:
        return self.tracer.decided(self, len)

    def __index__(self) -> int:
        return self.tracer.decided(self, operator.index)

    def __int__(self) -> int:
        return self.tracer.decided(self, int)

    def __float__(self) -> float:
        return self.tracer.decided(self, float)


class ValueAttribute(ValueProxy, Attribute):
    """An attribute of a proxy's value; becomes a node when it is not merely called."""


@contextmanager
def instances_of_values() -> Generator[None, None, None]:
    """`isinstance` takes a proxy for its value; `torch.fx.Proxy` names another class, so that none looks traced.

    Code that asks either question does in a trace what it does in a plain run. Proxies have no false `__class__`,
    which torch's C++ would believe.
    """
    plain, proxy = builtins.isinstance, torch.fx.Proxy

    def passing(instance: Any, kinds: Any) -> bool:
        if plain(instance, kinds):
            return True
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):  # pyright: ignore[reportPrivateUsage]
            return False  # torch's own Python hands what it takes for a tensor to its C++
        return plain(instance, ValueProxy) and issubclass(instance.tracer.class_of(instance), kinds)

    try:
        builtins.isinstance, torch.fx.Proxy = passing, _NoProxy  # pyright: ignore[reportAttributeAccessIssue]
        yield
    finally:
        builtins.isinstance, torch.fx.Proxy = plain, proxy


class _NoProxy:
    """What `torch.fx.Proxy` is called while a module is traced."""


class StateProxy(ValueProxy):
    """A parameter or a buffer, whose shape is a constant."""

    def __init__(self, tracer: Any, node: fx.Node, tensor: Tensor) -> None:
        super().__init__(node, tracer)
        self._tensor = tensor

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape

    @property
    def ndim(self) -> int:
        return self._tensor.ndim

    def size(self, *dim: Any) -> Any:
        """As that of the tensor."""
        return self._tensor.size(*dim)

    def dim(self) -> int:
        """As that of the tensor."""
        return self._tensor.dim()

    def numel(self) -> int:
        """As that of the tensor."""
        return self._tensor.numel()
