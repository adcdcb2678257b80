"""Settings of PyTorch of which there is one for all threads, changed only while this package captures or looks on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, cast

import torch

_here = threading.local()
_ABSENT: Any = object()


@torch.compiler.assume_constant_result  # pyright: ignore[reportUnknownMemberType]
def captures_here() -> bool:
    """Whether this thread is within a `SharedSettings.wanted`: what is changed for all may concern it alone.

    Asked by code that is captured, it says whether this package captures it.
    """
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
        holder: An object with the attribute, its own or its class's, or a dictionary.
        name: Of the attribute; the key.
        exchange: Makes the other one of what is there; of None, where a dictionary has nothing.
    """

    def __init__(self, holder: Any, name: Any, exchange: Callable[[Any], object]) -> None:
        self._holder, self._name, self._exchange = holder, name, exchange
        self._is_item = issubclass(type(holder), dict)
        self._own = _ABSENT

    def make(self) -> None:
        held = cast(Any, self._holder if self._is_item else vars(self._holder))
        self._own = held.get(self._name, _ABSENT)
        there = self._own
        if there is _ABSENT:
            there = None if self._is_item else getattr(self._holder, self._name)
        self._write(self._exchange(there))

    def undo(self) -> None:
        if self._own is not _ABSENT:
            self._write(self._own)
        elif self._is_item:
            del self._holder[self._name]
        else:
            delattr(self._holder, self._name)

    def _write(self, value: Any) -> None:
        if self._is_item:
            self._holder[self._name] = value
        else:
            setattr(self._holder, self._name, value)


class Deferred:
    """A change that is found anew each time it is made: PyTorch forgets what it caches, and makes another.

    Args:
        find: Finds it.
    """

    def __init__(self, find: Callable[[], Change]) -> None:
        self._find = find
        self._made: Change | None = None

    def make(self) -> None:
        self._made = self._find()
        self._made.make()

    def undo(self) -> None:
        assert self._made is not None, "it is not made"
        self._made.undo()


class SharedSettings:
    """Changes that are in force while any thread wants them: made for the first one, undone after the last.

    Args:
        *changes: What is done and undone.
        capturing: Whether who wants them captures.
    """

    def __init__(self, *changes: Change, capturing: bool = True) -> None:
        self._changes, self._capturing = changes, capturing
        self._num_wanting = 0
        self._made = ExitStack()
        self._lock = threading.Lock()

    @contextmanager
    def wanted(self) -> Generator[None]:
        """Within the block the changes are in force."""
        with self._lock:
            if not self._num_wanting:
                with ExitStack() as made:  # of which none stays if one fails
                    for change in self._changes:
                        change.make()
                        made.callback(change.undo)
                    self._made = made.pop_all()
            self._num_wanting += 1
        _here.depth = getattr(_here, "depth", 0) + self._capturing
        try:
            yield
        finally:
            _here.depth -= self._capturing
            with self._lock:
                self._num_wanting -= 1
                if not self._num_wanting:
                    self._made.close()
