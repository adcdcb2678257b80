"""Where the tensors that autograd saves belong: to an operation's output, to its tape, or to nobody's schedule."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..capture.tracer import Operation
from ..measure.meter import tensor_storage

Geometry = tuple[torch.Size, tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class OutputRef:
    """A saved tensor that lives in the storage of an operation's output.

    Attributes:
        operation: The operation that owns the storage.
        leaf: Which of its output tensors.
        geometry: Size, stride and storage offset; None where they are those of the output tensor itself.
    """

    operation: int
    leaf: int
    geometry: Geometry | None


@dataclass(frozen=True, slots=True)
class TapeRef:
    """A tensor saved for this backward alone, number `index` among the operation's saved tensors."""

    index: int


@dataclass(frozen=True, slots=True)
class ExternalRef:
    """A tensor that the schedule does not govern: a parameter, a buffer, an input of the region.

    Attributes:
        tensor: The saved tensor.
        version: Its version counter when saved, as autograd checks it.
    """

    tensor: Tensor
    version: int


Source = OutputRef | TapeRef | ExternalRef


def storage_key(tensor: Tensor) -> int | None:
    """A number that identifies the storage while it lives; None for tensors without one."""
    storage = tensor_storage(tensor)
    return None if storage is None else storage._cdata  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One output tensor of an operation, as it was made: what a recomputation must make again.

    Attributes:
        key: Identifies its storage while that lives.
        geometry: Size, stride and storage offset.
        dtype: Its type.
        requires_grad: Whether gradients flow to it.
        is_lazy: Whether the numbers in storage are not those of the tensor: a conjugation or negation is pending.
    """

    key: int | None
    geometry: Geometry
    dtype: torch.dtype
    requires_grad: bool
    is_lazy: bool

    @classmethod
    def of(cls, t: Tensor) -> Leaf:
        """The description of a tensor."""
        if t.layout is not torch.strided:
            return cls(None, (t.size(), (), 0), t.dtype, t.requires_grad, True)
        return cls(storage_key(t), geometry_of(t), t.dtype, t.requires_grad, t.is_conj() or t.is_neg())


def geometry_of(tensor: Tensor) -> Geometry:
    """Size, stride and storage offset."""
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values, which may be nested, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        else:
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def held_only_here(values: list[Any]) -> list[Tensor]:
    """The tensors among values to which no other Python code has a reference."""
    counts = _num_references(values)  # before another list holds them
    tensors = tensors_of(values)
    fewest = [_FEWEST + _OF_VIEWS * (t._use_count() > 1) for t in tensors]  # pyright: ignore[reportPrivateUsage]
    return [t for t, count, least in zip(tensors, counts, fewest, strict=True) if count == least]


def _num_references(values: list[Any]) -> list[int]:
    return [sys.getrefcount(t) for t in tensors_of(values)]


def _references_of_views() -> int:
    """What views of a tensor, which hold it outside Python, add to its count: one in all, in older PyTorch none."""
    base = torch.empty(1)
    view = base.view(1)
    (count,) = _num_references([base])
    del view
    return count - _num_references([base])[0]


(_FEWEST,) = _num_references([torch.empty(0)])
_OF_VIEWS = _references_of_views()


def storage_owners(
    operations: Sequence[Operation], leaves: Sequence[Sequence[Leaf]], n: int
) -> dict[int, tuple[int, int, Leaf]]:
    """For every storage that operation `n` reads or makes, the output that owns it: operation, leaf number, leaf.

    A view belongs to the operation that made the storage it views.
    """
    reads: list[int] = []
    for i in operations[n].inputs:
        reads.append(i)
        while (base := operations[reads[-1]].view_of) is not None:
            reads.append(base)
    owners: dict[int, tuple[int, int, Leaf]] = {}
    for i in (*sorted(reads), n):
        for k, leaf in enumerate(leaves[i]):
            if leaf.key is not None:
                owners.setdefault(leaf.key, (i, k, leaf))
    return owners


def classify(saved: list[Tensor], owners: dict[int, tuple[int, int, Leaf]], external: set[int]) -> list[Source]:
    """What each saved tensor is.

    Args:
        saved: In the order in which autograd saved them.
        owners: Storage key → (operation, number of the leaf, leaf) of the outputs that the operation read or made.
        external: The storages of parameters, buffers and inputs of the region.
    """
    sources: list[Source] = []
    for index, tensor in enumerate(saved):
        key = storage_key(tensor)
        owner = None if key is None else owners.get(key)
        if key in external:
            sources.append(ExternalRef(tensor.detach(), tensor._version))
        elif owner is None or owner[2].dtype != tensor.dtype or owner[2].is_lazy or tensor.is_conj() or tensor.is_neg():
            sources.append(TapeRef(index))
        else:
            geometry = geometry_of(tensor)
            sources.append(OutputRef(owner[0], owner[1], None if geometry == owner[2].geometry else geometry))
    return sources


def rebuilt(leaf: Tensor, geometry: Geometry | None) -> Tensor:
    """The saved tensor, from the output tensor that owns its storage."""
    if geometry is None:
        return leaf
    with torch.no_grad():
        return leaf.as_strided(*geometry)


def tensor_in(storage: torch.UntypedStorage, dtype: torch.dtype, geometry: Geometry) -> Tensor:
    """A tensor over an existing storage."""
    size, stride, offset = geometry
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


@contextmanager
def caught_tensors(caught: list[Tensor]) -> Generator[None, None, None]:
    """Puts every tensor that autograd saves inside into the list, from where backwards inside read them."""

    def pack(tensor: Tensor) -> int:
        caught.append(tensor)
        return len(caught) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, caught.__getitem__):
        yield
