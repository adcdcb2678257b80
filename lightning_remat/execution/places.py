"""Where the tensors that autograd saves of an operation were found to belong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..operations.saved_tensors import OutputRef, Source, geometry_of, storage_key, tensors_of

ELSEWHERE, TAPE = -1, -2


@dataclass(slots=True, eq=False)
class Reference:
    """What autograd holds in place of a saved tensor; the execution does not hold it back, so that both die at once.

    Attributes:
        operation: The one whose backward it is saved for.
        number: Which of those that are saved for it.
        held: The tensor itself, while the operation runs, and from then on where no schedule governs it.
        version: Of the held one, when it was saved.
    """

    operation: int
    number: int
    held: Any
    version: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a saved tensor was found to belong.

    Attributes:
        source: Its owner.
        slot: For a tensor in an output's storage, a value that the operation reads or makes in the same storage.
        leaf: Which tensor of that value.
        owner: Where to read it, if nothing but that is to be done: the slot of an output, `TAPE`, or else `ELSEWHERE`.
        part: Which item of the owner's value, where that is a tuple of tensors; -1 where it is a tensor.
        is_whole: Whether it is that tensor, and no part of it.
        is_last: Whether no later backward reads what its owner makes.
        is_alone: Whether, then, the owner makes nothing else, and the operation has saved nothing else of it.
        fellows: The numbers of the others that the operation has saved of what its owner makes.
    """

    source: Source
    slot: int = -1
    leaf: int = 0
    owner: int = ELSEWHERE
    part: int = -1
    is_whole: bool = False
    is_last: bool = False
    is_alone: bool = False
    fellows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Places:
    """Where the saved tensors of one operation belong.

    Attributes:
        every: The places, in the order in which autograd saves.
        whole: Numbers of those that are outputs themselves, where to find these, and which item each is, see `Place`.
        parts: Numbers of the others that live in outputs.
        own: Numbers of those that belong to its tape.
        made: Numbers of those that live outside though the operation makes them, and hold the graph.
    """

    every: tuple[Place, ...]
    whole: tuple[tuple[int, int, int], ...]
    parts: tuple[int, ...]
    own: tuple[int, ...]
    made: tuple[int, ...]


def is_same(a: Any, b: Tensor) -> bool:
    """Whether it is told at a glance that both are tensors of the same memory."""
    return a is b or (_start_alike(a, b) and a.shape == b.shape and a.stride() == b.stride())


def is_part(value: Any, tensor: Tensor, place: Place) -> bool:
    """Whether it is told at a glance that the tensor lives in the value, as it did when that was learned."""
    geometry = cast(OutputRef, place.source).geometry
    if geometry is None or tensor.layout is not torch.strided or geometry_of(tensor) != geometry:
        return False
    if value is tensor or _start_alike(value, tensor):
        return True
    return storage_key(tensors_of([value])[place.leaf]) == storage_key(tensor)


def _start_alike(a: Any, b: Tensor) -> bool:
    """Whether both begin in the same place of one storage, which is told of plain tensors while they live."""
    if type(a) is not Tensor or type(b) is not Tensor or not a.layout is b.layout is torch.strided:
        return False
    return a.data_ptr() == b.data_ptr() != 0 and a.dtype is b.dtype
