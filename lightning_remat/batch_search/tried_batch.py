"""The batch of a trial, at any size: every step gets it as if it had just come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..module_state.batches import as_new, record_values, tensors_held
from .resizing import resized


class TriedBatch:
    """Hands out a batch; what steps do to its values is put back, what they do to its structure they do to a copy.

    Args:
        given: The batch.
        size: Samples in it.
        told: The size of batches as their loader tells it.
        prepare: What is done to each batch before a step, such as a transfer to a device; None for nothing.
    """

    def __init__(
        self, given: Any, size: int, told: int | None = None, prepare: Callable[[Any], Any] | None = None
    ) -> None:
        self.given, self._size, self._told, self._prepare = given, size, told, prepare
        self._made: tuple[int, Any] | None = None
        self._undo = [record_values(tensors_held(given))]

    def of(self, size: int) -> Any:
        """The batch as it is for its own size, else repeated or cut to that, for one step."""
        self.put_back()
        if self._made is None or self._made[0] != size:
            self.forget()  # one at a time
            batch = self.given if size == self._size else resized(self.given, size, self._told)
            if self._prepare is not None:
                batch = self._prepare(as_new(batch))
            self._made = size, batch
            if batch is not self.given:
                self._undo.append(record_values(tensors_held(batch)))
        return as_new(self._made[1])

    def put_back(self) -> None:
        """Gives the tensors the values that they had."""
        for undo in self._undo:
            undo()

    def forget(self) -> None:
        """Lets go of what was made of the batch."""
        self._made = None
        del self._undo[1:]

    def close(self) -> None:
        """Lets go of all: what still refers to a trial must not hold its batch while training runs."""
        self.forget()
        self.given = None
        self._undo.clear()
