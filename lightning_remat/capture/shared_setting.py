"""Settings of PyTorch of which there is one for all threads, changed only while this package captures or looks on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol, cast

_here = threading.local()


def captures_here() -> bool:
    """Whether this thread is within a `SharedSettings.wanted`: what is changed for all may concern it alone."""
    return getattr(_here, "depth", 0) > 0


class OnlyHere:
    """A flag for the thread that captures; others see what it was.

    Args:
        own: What it was.
        here: What it is where `captures_here`.
    """

    def __init__(self, own: object, *, here: bool) -> None:
        self._own, self._here = own, here

    def __bool__(self) -> bool:
        return self._here if captures_here() else bool(self._own)


class Change(Protocol):
    """What can be done and undone; no context, as it is done in every call of a captured forward."""

    def make(self) -> None: ...

    def undo(self) -> None: ...


class Exchange:
    """An attribute, or what a dictionary has for a key, is made another.

    >>> handlers = {"sin": 1}
    >>> change = Exchange(handlers, "sin", lambda own: own + 1)
    >>> change.make()
    >>> handlers
    {'sin': 2}
    >>> change.undo()
    >>> handlers
    {'sin': 1}

    Args:
        holder: An object with an attribute of its own, or a dictionary.
        name: Of the attribute; the key.
        exchange: Makes the other one of what is there; of None, where a dictionary has nothing.
    """

    def __init__(self, holder: Any, name: Any, exchange: Callable[[Any], object]) -> None:
        self._holder, self._name, self._exchange = holder, name, exchange
        self._is_item = issubclass(type(holder), dict)
        self._own: Any = None

    def make(self) -> None:
        held = cast(Any, self._holder if self._is_item else vars(self._holder))
        self._own = held.get(self._name)
        self._write(self._exchange(self._own))

    def undo(self) -> None:
        self._write(self._own)

    def _write(self, value: Any) -> None:
        if not self._is_item:
            setattr(self._holder, self._name, value)
        elif value is None:
            del self._holder[self._name]
        else:
            self._holder[self._name] = value


class SharedSettings:
    """Changes that are in force while any thread wants them: made for the first one, undone after the last.

    Args:
        *changes: What is done and undone.
        capturing: Whether who wants them captures.
    """

    def __init__(self, *changes: Change, capturing: bool = True) -> None:
        self._changes, self._capturing = changes, capturing
        self._num_wanting = 0
        self._lock = threading.Lock()

    @contextmanager
    def wanted(self) -> Generator[None]:
        """Within the block the changes are in force."""
        with self._lock:
            if not self._num_wanting:
                for change in self._changes:
                    change.make()
            self._num_wanting += 1
        _here.depth = getattr(_here, "depth", 0) + self._capturing
        try:
            yield
        finally:
            _here.depth -= self._capturing
            with self._lock:
                self._num_wanting -= 1
                if not self._num_wanting:
                    for change in reversed(self._changes):
                        change.undo()
