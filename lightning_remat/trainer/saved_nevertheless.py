"""Tensors that are saved for a backward although hooks outside say that none is, and are told of them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def saved_nevertheless() -> Generator[None]:
    """What the block saves for its backward is kept, and shown to the hooks in force outside.

    So a step that differentiates can be run under hooks that only look.
    """
    outside: tuple[Callable[[Tensor], Any], Any] | None
    outside = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore

    def pack(tensor: Tensor) -> Tensor:
        if outside is not None:
            outside[0](tensor)
        return tensor.detach()  # not the tensor itself: what saves its own result would hold itself

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        yield
