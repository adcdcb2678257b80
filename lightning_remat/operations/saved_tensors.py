"""Where the tensors that autograd saves belong: to an operation's output, or to its tape or what lives outside."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..measure.meter import tensor_storage
from .operation import Operation

Geometry = tuple[torch.Size, tuple[int, ...], int]
Likeness = tuple[torch.Size, torch.dtype, torch.device]


@dataclass(frozen=True, slots=True)
class OutputRef:
    """A saved tensor that lives in the storage of an operation's output.

    Attributes:
        operation: The operation.
        leaf: Which of its output tensors.
        geometry: Size, stride and storage offset; None where they are those of the output tensor itself.
    """

    operation: int
    leaf: int
    geometry: Geometry | None


@dataclass(frozen=True, slots=True)
class TapeRef:
    """A tensor saved for this backward alone; a recomputation must save its like at the same place."""


@dataclass(frozen=True, slots=True)
class ExternalRef:
    """A tensor that the schedule does not govern: a parameter, a buffer, an input of the region."""


Source = OutputRef | TapeRef | ExternalRef


def version_of(tensor: Tensor) -> int | None:
    """How often autograd has seen the tensor written; None of one made in inference mode, where it does not count."""
    return None if tensor.is_inference() else tensor._version


def storage_key(tensor: Tensor) -> int | None:
    """A number that identifies the storage while the tensor lives; None for tensors without one."""
    storage = tensor_storage(tensor)
    return None if storage is None else storage._cdata  # pyright: ignore[reportPrivateUsage]


def storage_keys(tensors: Iterable[Tensor]) -> set[int]:
    """The keys of the storages of tensors."""
    return {key for t in tensors if (key := storage_key(t)) is not None}


def geometry_of(tensor: Tensor) -> Geometry:
    """Size, stride and storage offset."""
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())


def likeness_of(tensor: Tensor) -> Likeness:
    """What a tensor that a recomputation saves shares with the one that it stands for."""
    return tensor.shape, tensor.dtype, tensor.device


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values, which may be nested, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) is tuple or type(value) is list:
            found += tensors_of(cast("Iterable[Any]", value))
        elif value is not None:
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


@dataclass(frozen=True, slots=True)
class Leaf:
    """One output tensor of an operation, as it was made.

    Attributes:
        storage: Its storage, held weakly: another may take its place in memory once it has died.
        geometry: Size, stride and storage offset.
        dtype: Its type.
        requires_grad: Whether gradients flow to it.
        is_lazy: Whether the numbers in storage are not those of the tensor: a conjugation or negation is pending.
    """

    storage: weakref.ref[torch.UntypedStorage] | None
    geometry: Geometry
    dtype: torch.dtype
    requires_grad: bool
    is_lazy: bool

    @classmethod
    def of(cls, t: Tensor) -> Leaf:
        """The description of a tensor."""
        storage = tensor_storage(t)
        reference = None if storage is None else weakref.ref(storage)
        if t.layout is not torch.strided:
            return cls(reference, (t.size(), (), 0), t.dtype, t.requires_grad, True)
        return cls(reference, geometry_of(t), t.dtype, t.requires_grad, t.is_conj() or t.is_neg())

    @property
    def key(self) -> int | None:
        """`storage_key` of the tensor; None once its storage has died."""
        storage = None if self.storage is None else self.storage()
        return None if storage is None else storage._cdata  # pyright: ignore[reportPrivateUsage]


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
            if (key := leaf.key) is not None:
                owners.setdefault(key, (i, k, leaf))
    return owners


def classify(
    saved: Iterable[Tensor], owners: Mapping[int, tuple[int, int, Leaf]], external: Collection[int]
) -> list[Source]:
    """What each saved tensor is.

    Args:
        saved: In the order in which autograd saved them.
        owners: Storage key → (operation, number of the leaf, leaf) of the outputs that the operation read or made.
        external: The storages of parameters, buffers and inputs of the region.
    """
    sources: list[Source] = []
    for tensor in saved:
        key = storage_key(tensor)
        owner = None if key is None else owners.get(key)
        if key in external:
            sources.append(ExternalRef())
        elif owner is None or owner[2].dtype != tensor.dtype or owner[2].is_lazy or tensor.is_conj() or tensor.is_neg():
            sources.append(TapeRef())
        else:
            geometry = geometry_of(tensor)
            sources.append(OutputRef(owner[0], owner[1], None if geometry == owner[2].geometry else geometry))
    return sources


def held_tensors(results: Iterable[Tensor]) -> list[Tensor] | None:
    """The tensors that autograd holds for the backwards of the operation that made these, as it hands them over.

    What it holds as it was given is the same object here; of an operation's own result, and of a view that a kernel
    made of what it was given, it holds another. None where a function of the user's decides what is held, or where
    something has been written since it was saved.

    Args:
        results: Made from leaves, outside saved-tensor hooks.
    """
    found: list[Any] = []
    for node in nodes_below(results):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return None
        found += [value for _, value in saved_values(node)]
    return None if any(value is WRITTEN for value in found) else tensors_of(found)


WRITTEN = object()
"""In place of a saved value that has been written since: no gradient asks for it, and autograd hands it to nobody."""


def saved_values(node: Any) -> Iterator[tuple[str, Any]]:
    """What a node of autograd's has saved, with the names of the attributes by which it is read."""
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except RuntimeError as error:
                # By its own version, or that of a base of which it is one of several views.
                if not any(text in str(error) for text in ("modified by an inplace operation", "modified inplace")):
                    raise
                value = WRITTEN
            yield name, value


def nodes_below(results: Iterable[Tensor]) -> Iterator[Any]:
    """The nodes of autograd's graph that lead from these tensors to the leaves."""
    stack: list[Any] = [t.grad_fn for t in results]
    seen: set[Any] = {None}
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack += [following for following, _ in node.next_functions]


def rebuilt(leaf: Tensor, geometry: Geometry | None) -> Tensor:
    """The saved tensor, from the output tensor that owns its storage."""
    if geometry is None:
        return leaf
    if not torch.is_grad_enabled():
        return leaf.as_strided(*geometry)
    with torch.no_grad():
        return leaf.as_strided(*geometry)


def tensor_in(storage: torch.UntypedStorage, dtype: torch.dtype, geometry: Geometry) -> Tensor:
    """A tensor over an existing storage."""
    size, stride, offset = geometry
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
