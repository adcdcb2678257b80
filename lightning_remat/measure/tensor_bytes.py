"""Bytes of tensors: of the storages that they occupy, and of the elements that they show; their types and sizes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..schedules.graph import TensorKind
from .meter import tensor_storage


def storage_bytes(tensors: Iterable[Tensor], apart_from: Iterable[int | None] = ()) -> int:
    """Bytes of the distinct storages of the tensors, some storages left out (by their `storage_key`)."""
    seen = set(apart_from)
    total = 0
    for t in tensors:
        storage = tensor_storage(t)
        key = None if storage is None else storage._cdata  # pyright: ignore[reportPrivateUsage]
        if storage is None:
            total += t.numel() * t.element_size() if t.layout is torch.strided else _sparse_bytes(t)
        elif key not in seen:
            seen.add(key)
            total += storage.nbytes()
    return total


def _sparse_bytes(t: Tensor) -> int:
    if t.layout is torch.sparse_coo:
        return storage_bytes([t._indices(), t._values()])
    return t.numel() * t.element_size()


def tensor_kinds(tensors: Iterable[Tensor]) -> tuple[TensorKind, ...]:
    """Types and sizes of tensors, for what must be known without them."""
    return tuple(TensorKind(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in tensors)


def logical_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all elements of the tensors, whether or not they share them."""
    return sum(t.numel() * t.element_size() for t in tensors)
