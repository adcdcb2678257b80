"""What tests note of steps that are tried and undone: whatever such a step reaches otherwise is put back."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Diary(Generic[T]):
    """Entries that no trial takes back: they lie in an object that Python cannot look into."""

    def __init__(self) -> None:
        self._entries: SimpleQueue[T] = SimpleQueue()

    def add(self, entry: T) -> None:
        """Notes one more."""
        self._entries.put(entry)

    def read(self) -> list[T]:
        """All of them, which are gone then."""
        return [self._entries.get() for _ in range(self._entries.qsize())]

    def take(self, entry: T) -> bool:
        """Whether it is among them; it is gone then."""
        entries = self.read()
        is_there = entry in entries
        if is_there:
            entries.remove(entry)
        for other in entries:
            self.add(other)
        return is_there

    def __len__(self) -> int:
        return self._entries.qsize()
