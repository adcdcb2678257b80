"""Hooks of modules: they fire in the first run, as in the plain module, and in no other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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


def with_submodules(module: nn.Module) -> Iterable[nn.Module]:
    """The module and all inside it; most have none, and every operation of every step asks."""
    return module.modules() if module._modules else (module,)  # pyright: ignore[reportPrivateUsage]


_computing: set[int] = set()
"""Handles of the hooks that were seen to change values; PyTorch numbers them through the whole process."""


@contextmanager
def silenced_hooks(module: nn.Module) -> Generator[None, None, None]:
    """The module and its submodules without the hooks that observe; those that change values or make a weight stay."""
    with _exchanged(module, lambda name, key, hook: hook if "backward" not in name and _computes(key, hook) else None):
        yield


@contextmanager
def noted_hooks(module: nn.Module) -> Generator[None, None, None]:
    """Notes which hooks change values inside, so that a recomputation does not leave them out."""

    def choose(name: str, key: int, hook: Any) -> Any:
        return hook if "backward" in name or _computes(key, hook) else partial(_noted, key, hook)

    with _exchanged(module, choose):
        yield


@contextmanager
def _exchanged(module: nn.Module, choose: Callable[[str, int, Any], Any]) -> Generator[None, None, None]:
    exchanged: list[tuple[nn.Module, str, Any]] = []
    for m in with_submodules(module):
        if has_hooks(m):
            for name in HOOKS:
                hooks = getattr(m, name)
                exchanged.append((m, name, hooks))
                chosen = ((key, choose(name, key, hook)) for key, hook in hooks.items())
                setattr(m, name, OrderedDict((key, hook) for key, hook in chosen if hook is not None))
    try:
        yield
    finally:
        for m, name, hooks in exchanged:
            setattr(m, name, hooks)


def _noted(key: int, hook: Any, *args: Any, **kwargs: Any) -> Any:
    tensors = [t for t in tree_leaves((args[1:], kwargs)) if isinstance(t, Tensor) and not t.is_inference()]
    versions = [t._version for t in tensors]
    result = hook(*args, **kwargs)
    if result is not None or [t._version for t in tensors] != versions:
        _computing.add(key)
    return result


def _computes(key: int, hook: Any) -> bool:
    """Whether a hook is part of the computation, as one that makes a normalized or pruned weight is."""
    return key in _computing or type(hook).__module__.startswith("torch.nn.utils")


@contextmanager
def silenced_tensor_hooks(module: nn.Module) -> Generator[None, None, None]:
    """Parameters with hooks of their own give place to others in the same memory, which have none."""
    replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    twins: dict[int, nn.Parameter] = {}
    for m in module.modules():
        parameters: dict[str, Any] = m._parameters  # pyright: ignore[reportPrivateUsage]
        for name, p in parameters.items():
            if getattr(p, "_backward_hooks", None) or getattr(p, "_post_accumulate_grad_hooks", None):
                replaced.append((parameters, name, p))
                twins.setdefault(id(p), nn.Parameter(p.detach(), p.requires_grad))
    try:
        for parameters, name, p in replaced:
            parameters[name] = twins[id(p)]
        yield
    finally:
        for parameters, name, p in replaced:
            parameters[name] = p
