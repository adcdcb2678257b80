"""Which compiled forward a module has: its own, or one that it shares with others of equal structure."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from typing import Any, cast

from torch import nn

from . import hook_guards
from .dynamo import CompiledForward
from .written_out import divisible

_forwards: tuple[weakref.WeakKeyDictionary[nn.Module, CompiledForward], ...] = (
    weakref.WeakKeyDictionary(),
    weakref.WeakKeyDictionary(),
)


def forward_of(module: nn.Module, *, is_whole: bool = True) -> CompiledForward:
    """The compiled forward of a module, the same as long as the module lives: what was captured serves again."""
    function: Any = type(module).forward if is_whole else divisible(module)
    known = _forwards[is_whole].get(module)
    if known is None or known.function is not function or known.is_exhausted:
        known = _forwards[is_whole][module] = CompiledForward(function, is_whole=is_whole)
    known.has_hooks = is_whole and hook_guards.has_backward_hooks(module)
    return known


def share_forwards(modules: Iterable[nn.Module]) -> None:
    """Lets modules of equal structure have one compiled forward: where the guards hold, one is captured for all."""
    alike: dict[Hashable, list[nn.Module]] = {}
    for module in modules:
        alike.setdefault(_structure(module), []).append(module)
    for group in alike.values():
        known = next((forward for m in group if (forward := _forwards[True].get(m)) is not None), None)
        shared = known or CompiledForward(cast(Any, type(group[0])).forward, num_modules=len(group))
        for module in group:
            _forwards[True].setdefault(module, shared)


def _structure(module: nn.Module) -> Hashable:
    """What of a module tells whether one graph may do for it and another: classes, parameters, settings.

    Whole numbers are left out: mostly they say which of the blocks this is, and where it matters a guard knows.
    """
    found: list[Hashable] = []
    for name, m in cast(Iterable[tuple[str, nn.Module]], module.named_modules()):
        owned = (*m.named_parameters(recurse=False), *m.named_buffers(recurse=False))
        tensors = tuple((k, t.shape, t.dtype, t.requires_grad) for k, t in owned)
        settings = tuple((k, v) for k, v in vars(m).items() if isinstance(v, bool | float | str))
        found.append((name, type(m), tensors, settings))
    return tuple(found)
