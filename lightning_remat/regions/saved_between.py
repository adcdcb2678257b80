"""Bytes that the code between the regions of a step saves for its backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from ..measure.meter import tensor_storage
from ..operations.saved_tensors import storage_key


class SavedBetween:
    """What the code outside the chosen calls saves for its backward; none of it is held."""

    def __init__(self, owned: list[Tensor]) -> None:
        self.owned: set[int] = set()
        self.own(owned)
        self.noted: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.gone_bytes = 0

    def own(self, tensors: Iterable[Tensor]) -> None:
        """What is alive throughout, or counted elsewhere."""
        self.owned |= {key for t in tensors if (key := storage_key(t)) is not None}

    def note(self, tensor: Tensor, returned: Iterable[weakref.ref[torch.UntypedStorage]]) -> None:
        """Counts the storage of a saved tensor, unless a call has returned it or it is counted already."""
        storage, key = tensor_storage(tensor), storage_key(tensor)
        if storage is None or key is None or key in self.owned or any(r() is storage for r in returned):
            return
        known = self.noted.get(key)
        if known is not None and known[0]() is storage:
            return
        if known is not None:  # it has died, and its place was taken
            self.gone_bytes += known[1]
        self.noted[key] = weakref.ref(storage), storage.nbytes()

    def bytes_beside(self, inputs: Iterable[Tensor]) -> int:
        """Bytes of all that was noted and is no input of a call."""
        held = {id(s) for t in inputs if (s := tensor_storage(t)) is not None}
        return self.gone_bytes + sum(size for storage, size in self.noted.values() if id(storage()) not in held)
