"""Where the saved tensors of an operation belong: found out in a first execution, by the storages that live then."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from ..operations.saved_tensors import (
    ExternalRef,
    Leaf,
    OutputRef,
    TapeRef,
    classify,
    storage_key,
    storage_owners,
    tensors_of,
)
from .program import ELSEWHERE, TAPE, Place, Places, Program


class Learning:
    """What is noted while an execution runs its forward for the first time.

    Args:
        program: What is executed.
        values: The table of the execution.
        num_given: How many of the values are those of placeholders.
    """

    def __init__(self, program: Program, values: list[Any], num_given: int) -> None:
        self.program, self.values = program, values
        self.leaves: list[list[Leaf]] = [[] for _ in program.steps]
        self.external = {key for t in tensors_of(values[:num_given]) if (key := storage_key(t)) is not None}

    def note(self, n: int) -> None:
        """Operation n has run; its outputs are in the table."""
        self.leaves[n] = [Leaf.of(t) for t in tensors_of(self.values[slot] for slot in self.program.steps[n].outputs)]

    def places(self, n: int, saved: list[Tensor]) -> Places:
        """Where the tensors belong that operation n has just saved; its inputs live, so that storages tell."""
        step = self.program.steps[n]
        witnesses: dict[int | None, tuple[int, int]] = {}
        for slot in (*step.inputs, *step.outputs):
            for k, t in enumerate(tensors_of([self.values[slot]])):
                witnesses.setdefault(storage_key(t), (slot, k))
        owners = storage_owners(self.program.traced.operations, self.leaves, n)
        found: list[Place] = []
        sources = classify(saved, owners, self.external)
        saved_of = Counter(source.operation for source in sources if isinstance(source, OutputRef))
        for tensor, source in zip(saved, sources, strict=True):
            witness = witnesses.get(storage_key(tensor))
            if isinstance(source, OutputRef) and witness is not None:
                owner = self.program.steps[source.operation]
                is_whole = source.geometry is None and (owner.outputs, source.leaf) == ((witness[0],), witness[1])
                is_only = saved_of[source.operation] == 1
                is_simple = is_only and len(owner.outputs) == 1 and not step.may_keep
                is_simple &= isinstance(self.values[owner.outputs[0]], Tensor)
                slot = owner.outputs[0] if is_simple else ELSEWHERE
                is_last = source.operation in self.program.released[n]
                found.append(Place(source, *witness, is_whole, is_only, slot, is_last))
            elif isinstance(source, ExternalRef):
                found.append(Place(source))
            else:  # where nothing that it sees lives in that storage, the tensor is its own
                own = TapeRef(tensor.shape, tensor.dtype, tensor.device)
                found.append(Place(own, owner=ELSEWHERE if step.may_keep else TAPE))
        made = {storage_key(t) for t in tensors_of(self.values[slot] for slot in step.outputs)}
        numbered = list(enumerate(found))
        return Places(
            tuple(found),
            tuple((k, place.slot) for k, place in numbered if place.is_whole),
            tuple((k, place.source) for k, place in numbered if isinstance(place.source, TapeRef)),
            tuple(
                (k, place)
                for k, place in numbered
                if (isinstance(place.source, OutputRef) and not place.is_whole)
                or (isinstance(place.source, ExternalRef) and storage_key(saved[k]) in made)
            ),
        )
