"""Hooks of modules: they fire in the first run, as in the plain module, and in no other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""The attributes of a module that hold the hooks of its calls."""


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its `forward`."""
    return any(getattr(module, name, None) for name in HOOKS)


@contextmanager
def silenced_hooks(module: nn.Module) -> Generator[None, None, None]:
    """The module and its submodules without the hooks that observe; those that make a weight stay."""
    silenced: list[tuple[nn.Module, str, Any]] = []
    for m in module.modules():
        if has_hooks(m) and not _hooks_compute(m):
            for name in HOOKS:
                silenced.append((m, name, getattr(m, name)))
                setattr(m, name, OrderedDict())
    try:
        yield
    finally:
        for m, name, hooks in silenced:
            setattr(m, name, hooks)


def _hooks_compute(module: nn.Module) -> bool:
    """Whether hooks are part of the computation, as those that make a normalized or pruned weight are."""
    hooks: list[Any] = list(vars(module)["_forward_pre_hooks"].values())
    return any(type(h).__module__.startswith("torch.nn.utils") for h in hooks)
