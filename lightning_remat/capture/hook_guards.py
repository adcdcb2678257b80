"""Whether submodules have hooks, asked of all at once: TorchDynamo's guards ask it of six dictionaries of each.

Those are the largest part of what is guarded of a network of many small layers, and guards are what a call costs there.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn
from torch._dynamo.guards import GuardBuilder

from .shared_setting import Exchange

# Private to `nn.Module`, whose own call reads them.
# pyright: reportPrivateUsage=false

_OF_A_SUBMODULE = re.compile(r"L\['self'\](\._modules\['[^']+'\])+\._(forward|backward)(_pre)?_hooks(_with_kwargs)?")

_here = threading.local()


@contextmanager
def hooks_guarded(are_guarded: bool) -> Generator[None]:
    """Whether what this thread captures inside is guarded against hooks that submodules get later.

    Else `has_hooked_submodules` is to be asked before each call. Modules that are reached otherwise are always guarded.
    """
    before = getattr(_here, "are_left_out", False)
    _here.are_left_out = not are_guarded
    try:
        yield
    finally:
        _here.are_left_out = before


def has_hooked_submodules(module: nn.Module) -> bool:
    """Whether any submodule has hooks that a call of it runs.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    >>> has_hooked_submodules(net)
    False
    >>> handle = net[1][0].register_forward_hook(print)
    >>> has_hooked_submodules(net)
    True
    """
    found, seen = [*module._modules.values()], {module}
    try:
        for m in found:  # which grows meanwhile
            if m is None:
                continue
            own = m.__dict__
            if own["_forward_hooks"] or own["_backward_hooks"]:
                return True
            if own["_forward_pre_hooks"] or own["_backward_pre_hooks"]:
                return True
            if (children := own["_modules"]) and m not in seen:  # a child may know its parent
                seen.add(m)
                found += children.values()
    except KeyError:  # of torch.jit, or never initialized: nobody knows
        return True
    return False


_modules: Any = nn.modules.module

_OF_ALL: tuple[dict[int, Any], ...] = (
    _modules._global_forward_pre_hooks,
    _modules._global_forward_hooks,
    _modules._global_backward_pre_hooks,
    _modules._global_backward_hooks,
)
"""Those that `torch.nn.modules.module.register_module_forward_hook` and its kin fill."""


def hooks_of_all_modules() -> tuple[int, ...]:
    """The numbers, each given once, of the hooks that every module has: TorchDynamo has no guards of these."""
    return tuple(number for hooks in _OF_ALL for number in hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether submodules have backward hooks, of their own or as all modules do."""
    inside: Any = (m for m in module.modules() if m is not module)
    return bool(_OF_ALL[2] or _OF_ALL[3]) or any(m._backward_hooks or m._backward_pre_hooks for m in inside)


def _unless_left_out(guard_hooks: Callable[..., None]) -> Callable[..., None]:
    @wraps(guard_hooks)
    def guard_other_hooks(builder: Any, guard: Any) -> None:
        if not (getattr(_here, "are_left_out", False) and _OF_A_SUBMODULE.fullmatch(guard.name)):
            guard_hooks(builder, guard)

    return guard_other_hooks


CHANGES = [Exchange(GuardBuilder, "EMPTY_NN_MODULE_HOOKS_DICT", _unless_left_out)]
