"""Hooks of saved tensors that step aside where torch.func takes derivatives, which forbids them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..capture.shared_setting import Exchange, SharedSettings


class _Unpack:
    """A hook by which those that step aside are told from others."""

    def __init__(self, unpack: Callable[[Any], Tensor]) -> None:
        self.unpack = unpack

    def __call__(self, packed: Any) -> Tensor:
        return self.unpack(packed)


@contextmanager
def hooks_outside_transforms(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Generator[None]:
    """`saved_tensors_hooks`, but within `torch.func.grad` and its like, where nothing is packed."""
    with _STEPPING_ASIDE.wanted(), saved_tensors_hooks(pack, _Unpack(unpack)):
        yield


def _after_stepping_aside(disabled: Callable[[str], AbstractContextManager[None]]) -> object:
    @contextmanager
    def disable_saved_tensors_hooks(error_message: str) -> Generator[None]:
        autograd: Any = cast(Any, torch)._C._autograd
        hooks = autograd._top_saved_tensors_default_hooks(True) or (None, None)
        steps_aside = isinstance(hooks[1], _Unpack)
        if steps_aside:
            autograd._pop_saved_tensors_default_hooks()
        try:
            with disabled(error_message):
                yield
        finally:
            if steps_aside:
                autograd._push_saved_tensors_default_hooks(*hooks)

    return disable_saved_tensors_hooks


_STEPPING_ASIDE = SharedSettings(
    Exchange(torch.autograd.graph, "disable_saved_tensors_hooks", _after_stepping_aside), capturing=False
)
