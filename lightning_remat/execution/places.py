"""Where the tensors that autograd saves of an operation were found to belong."""

from __future__ import annotations

from dataclasses import dataclass

from ..operations.saved_tensors import Source

ELSEWHERE, TAPE = -1, -2


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
