"""What a step saves for its backward: the code between its regions in bytes, all of it by its storages."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..measure.meter import tensor_storage
from ..operations.saved_tensors import storage_key, storage_keys
from .phases import Span


class SavedBetween:
    """What the code outside the chosen calls saves for its backward; none of it is held.

    Args:
        owned: Keys of storages that are alive throughout.
    """

    def __init__(self, owned: Iterable[int]) -> None:
        self.owned = set(owned)
        self.noted: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.gone_bytes = 0

    def own(self, tensors: Iterable[Tensor]) -> None:
        """What is alive throughout, or counted elsewhere."""
        self.owned |= storage_keys(tensors)

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


class Staying:
    """The storages that a step saves for its backward or returns, wherever it makes them; none of them is held."""

    def __init__(self) -> None:
        # Of a storage there is one weak reference, which is known when the storage has died.
        self._noted: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Counts the storages of tensors."""
        refs = (weakref.ref(s) for t in tensors if (s := tensor_storage(t)) is not None)
        self._noted |= {id(ref): ref for ref in refs}

    def __contains__(self, storage: weakref.ref[torch.UntypedStorage]) -> bool:
        return id(storage) in self._noted


def _bytes_beside(parts: Sequence[SavedBetween], inputs: Iterable[Tensor]) -> int:
    """Bytes of all that was noted, once where several parts have noted it, and is no input of a call."""
    held = {id(s) for t in inputs if (s := tensor_storage(t)) is not None}
    # Of a storage that is alive there is one weak reference, which all parts share.
    noted = {id(storage): (storage, size) for part in parts for storage, size in part.noted.values()}
    there = sum(size for storage, size in noted.values() if id(storage()) not in held)
    return there + sum(part.gone_bytes for part in parts)


def most_bytes_between(
    spans: Sequence[Span], between: Mapping[int, list[SavedBetween]], inputs: Sequence[Tensor]
) -> int:
    """What is saved between the calls, at most at once."""
    phases = [_bytes_beside(between[phase], inputs) for phase in {span.begun for span in spans} if phase in between]
    return (max if all(span.begun == span.until for span in spans) else sum)([0, *phases])
