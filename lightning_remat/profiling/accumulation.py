"""How a leaf takes its gradient: PyTorch copies one that does not lie in memory as the leaf does."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from .layouts import is_dense

# pyright: reportPrivateUsage=false


@contextmanager
def copied_as_accumulated(leaves: Iterable[Tensor]) -> Generator[None]:
    """Lets `torch.autograd.grad` copy the gradients that a backward copies when it adds them to `.grad`.

    These are of convolutions on inputs with the channels last, for one: the gradient and its copy are there at once.

    Args:
        leaves: By which is differentiated.
    """
    with ExitStack() as hooks:
        for leaf in (t for t in leaves if t.requires_grad):  # a forward may have frozen some
            hooks.enter_context(hooked(leaf, partial(_taken, leaf.detach())))
        yield


@contextmanager
def hooked(leaf: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Generator[None]:
    """A hook on the gradient of a tensor of the user's, to which it leaves nothing.

    PyTorch keeps the place of hooks that are gone, and each backward looks into it: as long as a small kernel.
    """
    handle: Any = cast(Any, leaf).register_hook(hook)
    try:
        yield
    finally:
        handle.remove()
        if not leaf._backward_hooks:
            leaf._backward_hooks = None


def _taken(leaf: Tensor, gradient: Tensor) -> Tensor | None:
    if leaf.layout is not torch.strided or gradient.layout is not torch.strided:
        return None
    strides = leaf.stride() if is_dense(leaf) else leaf.detach().contiguous().stride()
    if all(a == b or size == 1 for a, b, size in zip(gradient.stride(), strides, leaf.size(), strict=True)):
        return None
    return gradient.new_empty_strided(leaf.size(), strides).copy_(gradient)
