"""Values without their graphs, and what of them asks for gradients."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .saved_tensors import tensors_of


def leaf_of(value: Any) -> Any:
    """The value cut from its graph, asking for gradients where it did."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(True) if value.requires_grad else value.detach()
    if value is None:
        return None
    if type(value) is tuple:  # as most operations return that return several
        return tuple([leaf_of(item) for item in cast("tuple[Any, ...]", value)])
    return tree_map_only(Tensor, leaf_of, value)


def copy_of(tensor: Tensor) -> Tensor:
    """What has its values and may be written in place, asking for gradients where it does, but without its graph."""
    if not tensor.requires_grad:
        return tensor.detach().clone()
    with torch.enable_grad():
        return tensor.detach().requires_grad_().clone()  # PyTorch writes into no leaf


def detached(value: Any) -> Any:
    """The same value with every tensor cut from its autograd graph."""
    if isinstance(value, Tensor):
        return value.detach()
    return tree_map_only(Tensor, lambda t: t.detach(), value)


Differentiable = tuple[int, int]
"""A tensor that asks for gradients: its slot, and which of the tensors there it is, -1 for the value itself."""


def differentiable_in(slot: int, value: Any) -> list[Differentiable]:
    """What asks for gradients in a value."""
    if isinstance(value, Tensor):
        return [(slot, -1)] if value.requires_grad else []
    return [(slot, leaf) for leaf, tensor in enumerate(tensors_of([value])) if tensor.requires_grad]


def ask_for_gradients(value: Any, leaf: int) -> None:
    """A tensor in a value asks for gradients from here on."""
    (value if leaf < 0 else tensors_of([value])[leaf]).requires_grad_()
