"""Which parts of a module can be captured where the whole cannot: the outermost submodules that trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from .errors import TraceError
from .regions import Call, look_through, submodules
from .tracer import TracedModule, trace


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """The parts of a module that can be rematerialized one by one.

    Attributes:
        calls: Their calls in the order of a step; a submodule that is called twice appears twice.
        traced: Submodule name → its operations.
        saved_bytes: What the code between them saves for its backward.
        reasons: Why each part that is not among them, though it contains some or is left as it is, was not captured.
    """

    calls: tuple[Call, ...]
    traced: dict[str, TracedModule]
    saved_bytes: int
    reasons: tuple[str, ...]


def find_regions(root: nn.Module, step: Callable[[], object]) -> Regions:
    """The outermost submodules of `root` that can be traced as a step calls them.

    A submodule that cannot is looked into: its own submodules are tried, and what it does besides stays plain. The
    step is run once for each level; it holds the arguments of the calls, as the planned step will too.

    Args:
        root: A module whose own `forward` cannot be traced.
        step: Runs its forward and leaves no trace.
    """
    names = {m: name for name, m in reversed(submodules(root))}
    traced: dict[nn.Module, TracedModule] = {}
    reasons: dict[str, str] = {}
    watched = list(_callable_children(root))
    while watched:
        try:
            view = look_through(root, step, watched)
        except ValueError:  # none of them is called
            break
        calls = [call for call in view.calls if call.is_differentiable]
        failed: set[nn.Module] = set()
        for module in dict.fromkeys(call.module for call in calls):
            if module not in traced:
                try:
                    traced[module] = _traced([call for call in calls if call.module is module])
                except TraceError as error:
                    failed.add(module)
                    reasons[names[module]] = f"{names[module]}: {error}"
        if not failed:
            found = {call.name: traced[call.module] for call in calls}
            return Regions(tuple(calls), found, view.saved_bytes, tuple(reasons.values()))
        called = [call.module for call in calls]
        watched = _outermost(
            inner for m in dict.fromkeys(called) for inner in (_callable_children(m) if m in failed else [m])
        )
    return Regions((), {}, 0, tuple(reasons.values()))


def traced_call(call: Call) -> TracedModule:
    """The operations of a call."""
    return trace(call.module, *call.args, **call.kwargs)


def _traced(calls: Sequence[Call]) -> TracedModule:
    """The operations of a submodule, all calls of which must be alike."""
    for a, b in pairwise(calls):
        if _kind_of_call(a) != _kind_of_call(b):
            raise TraceError(f"it is called {len(calls)} times in a step, with arguments of different kinds")
    return traced_call(calls[0])


def _kind_of_call(call: Call) -> tuple[Any, list[Any]]:
    leaves, structure = tree_flatten((call.args, call.kwargs))
    return structure, [type(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _callable_children(module: nn.Module) -> Iterator[nn.Module]:
    """The submodules right below that have a forward, those in containers included.

    A layer of PyTorch's without submodules is left out: it is one operation, whose input the code around it holds.
    """
    for name, child in module.named_children():
        is_layer = type(child).__module__.startswith("torch.nn.") and not any(child.children())
        if name == "parametrizations" or is_layer:
            continue
        if type(child).forward is nn.Module.forward:
            yield from _callable_children(child)
        else:
            yield child


def _outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that lie inside no other of them."""
    found = list(dict.fromkeys(modules))
    inside = {inner for m in found for inner in m.modules() if inner is not m}
    return [m for m in found if m not in inside]
