"""What a trace has turned into constants: flags, classes and plain attributes of modules."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as module_hooks

from ..module_state.hooks import has_hooks

# The attributes of users' modules have no types.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

_KEY = "attributes"
_INTERNAL = frozenset(vars(nn.Module())) | {"forward"}
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, types.FunctionType, type)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The Python side of a module as traced.

    Attributes:
        modules: Class and training flag of every submodule.
        entered: Places among them of those whose forward was traced through, without the root.
        attributes: Module path, name and value of the plain attributes that the forward has read.
    """

    modules: tuple[tuple[type, bool], ...]
    entered: tuple[int, ...]
    attributes: tuple[tuple[str, str, Any], ...]

    @classmethod
    def of(cls, module: nn.Module, graph: fx.Graph) -> Fingerprint:
        """The state on which `graph` depends, right after the trace that made it."""
        output = next(n for n in graph.nodes if n.op == "output")
        called = tuple(f"{n.target}." for n in graph.nodes if n.op == "call_module")
        paths = [path for path, _ in _named(module)]
        entered = tuple(k for k, path in enumerate(paths) if path and not f"{path}.".startswith(called))
        return cls(_classes(module), entered, output.meta.get(_KEY, ()))

    def difference(self, module: nn.Module) -> str | None:
        """What is no longer as it was, or None."""
        now = _classes(module)
        if now != self.modules:
            kinds = [kind for kind, _ in now] == [kind for kind, _ in self.modules]
            what = "the training flags" if kinds else "the number or the classes"
            return f"{what} of its submodules have changed"
        for path, name, value in self.attributes:
            if not _same(getattr(module.get_submodule(path), name, _INTERNAL), value):
                return f"the attribute {f'{path}.{name}'.lstrip('.')}, which was {value!r}, has changed"
        if module_hooks._has_any_global_hook():  # pyright: ignore[reportPrivateUsage]
            return "hooks for all modules are registered"
        submodules = list(module.modules())
        if any(has_hooks(submodules[k]) for k in self.entered):
            return "a hook has been registered on a submodule that runs as several operations"
        return None


@contextmanager
def watched_attributes(tensor: Callable[[Tensor], Any]) -> Generator[set[tuple[int, str]], None, None]:
    """Yields a set that fills with (id of the module, name) of the attributes that code inside reads.

    Args:
        tensor: What code inside gets in place of a tensor that is an attribute.
    """
    read: set[tuple[int, str]] = set()

    def seen(module: nn.Module, name: str) -> Any:
        value = object.__getattribute__(module, name)
        if name[:2] != "__" and name not in _INTERNAL:
            read.add((id(module), name))
            if isinstance(value, Tensor):
                return tensor(value)
        return value

    cast(Any, nn.Module).__getattribute__ = seen
    try:
        yield read
    finally:
        del cast(Any, nn.Module).__getattribute__


def note_attributes(graph: fx.Graph, root: nn.Module, read: Iterable[tuple[int, str]]) -> None:
    """Keeps with the graph the plain ones among the attributes that were read while tracing."""
    paths = {id(m): (path, m) for path, m in _named(root)}
    found: list[tuple[str, str, Any]] = []
    for key, name in sorted(read):
        path, owner = paths.get(key, ("", None))
        if owner is not None and name in vars(owner):
            value = vars(owner)[name]
            if _is_plain(value):
                found.append((path, name, value.copy() if isinstance(value, (list, dict, set)) else value))
    output = next(n for n in graph.nodes if n.op == "output")
    output.meta[_KEY] = tuple(found)


def _named(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(cast(Iterable[tuple[str, nn.Module]], module.named_modules()))


def _classes(module: nn.Module) -> tuple[tuple[type, bool], ...]:
    return tuple((type(m), m.training) for m in module.modules())


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(v) for v in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(v) for v in value)
    return isinstance(value, _PLAIN)


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and _is_plain(a) and bool(a == b))
