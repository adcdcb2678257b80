"""Iterators that a module holds: tried steps take from them what the steps of training will take once more."""

from __future__ import annotations

import ast
import io
import itertools
from collections import deque
from collections.abc import Callable, MutableSequence
from typing import Any, NamedTuple, Self, cast

from .batches import as_new, record_values, tensors_held
from .containers import items_of, write_into
from .random_state import RandomState

_Count: Any = itertools.count
_SEQUENCES: Any = ([], (), range(0), range(2**70), "", b"", bytearray())
_WITH_PLACE: tuple[Any, ...] = (*(cast(Any, type(iter(some))) for some in _SEQUENCES),)
"""Those that tell their place, and can be set to it: of ranges, before Python 3.12."""


def _recipe(iterator: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """What makes one that goes on as a counter or the iterator of a range does; None for others."""
    if type(iterator) is _Count:
        try:  # its text is all that tells of it, as nothing of itertools can be copied from Python 3.14 on
            return _Count, ast.literal_eval(f"{str(iterator)[len('count(') : -1]},")
        except (ValueError, SyntaxError):  # it does not count in plain numbers
            return None
    return iterator.__reduce__()[:2] if isinstance(iterator, _WITH_PLACE) else None


class _Taken(NamedTuple):
    """What an iterator gave: the random states before and after it, and what puts its values back."""

    item: Any
    before: RandomState
    after: RandomState
    put_back: Callable[[], None]


class Rewindable:
    """An iterator in the place of one that knows no way back.

    What is taken while steps are tried it gives once more, to each step that is tried and to the first ones that are
    not: with the random numbers that were drawn for it, if the states are the same. Then it goes on.

    >>> squares = Rewindable(k * k for k in range(5))
    >>> squares.begin()
    >>> next(squares), next(squares)
    (0, 1)
    >>> squares.rewind()
    >>> [*squares]
    [0, 1, 4, 9, 16]

    Args:
        source: The iterator.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self._taken: deque[_Taken] = deque()
        self._place, self._is_tried = 0, False

    @property
    def is_untouched(self) -> bool:
        """Whether the source is where it was."""
        return not self._taken

    def begin(self) -> None:
        """From here on steps are tried."""
        self._place, self._is_tried = 0, True

    def rewind(self) -> None:
        """Back to where it was when they began."""
        self._place, self._is_tried = 0, False
        for taken in self._taken:
            taken.put_back()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._place == len(self._taken):
            if not self._is_tried:
                return next(self.source)
            before, item = RandomState.of_all(), next(self.source)
            self._taken.append(_Taken(item, before, RandomState.of_all(), record_values(tensors_held(item))))
        elif self._taken[self._place].before.is_current():
            self._taken[self._place].after.put_back()
        if not self._is_tried:
            return self._taken.popleft().item
        self._place += 1
        return as_new(self._taken[self._place - 1].item)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as pickle and copies ask, before there is a source
            raise AttributeError(name)
        return getattr(self.source, name)


def iterators_undo(
    holder: dict[Any, Any] | MutableSequence[Any], known: dict[int, Any] | None = None
) -> Callable[[], None]:
    """Puts back the iterators among attributes, or among what a container holds, to where they are now.

    >>> names = {"numbers": itertools.count(3), "names": iter(["a", "b", "c"])}
    >>> put_back = iterators_undo(names)
    >>> next(names["numbers"]), next(names["names"]), next(names["names"])
    (3, 'a', 'b')
    >>> put_back()
    >>> next(names["numbers"]), next(names["names"])
    (3, 'a')

    Args:
        holder: The attributes, or the container.
        known: By the identities of iterators, what stands for those that others hold, too; completed.
    """
    known = {} if known is None else known
    places: list[tuple[Any, Any]] = []
    anew: list[tuple[Any, Any, tuple[Callable[..., Any], tuple[Any, ...]]]] = []
    others: list[tuple[Any, Rewindable]] = []
    write = write_into(holder)
    for name, value in items_of(holder):
        if isinstance(value, _WITH_PLACE) and (found := (*value.__reduce__(), None)[2]) is not None:
            places.append((value, found))
        elif (recipe := _recipe(value)) is not None:
            anew.append((name, value, recipe))
        elif hasattr(cast(Any, type(value)), "__next__") and not isinstance(value, io.IOBase):
            source: Any = value.source if isinstance(value, Rewindable) else value
            own = value if isinstance(value, Rewindable) else Rewindable(value)
            rewindable = known.setdefault(id(source), own)
            write(name, rewindable)
            rewindable.begin()
            others.append((name, rewindable))

    def put_back() -> None:
        for iterator, place in places:
            iterator.__setstate__(place)
        for name, iterator, (make, arguments) in anew:
            if _recipe(iterator) != (make, arguments):
                write(name, known.setdefault(id(iterator), make(*arguments)))
        for name, rewindable in others:
            rewindable.rewind()
            write(name, rewindable.source if rewindable.is_untouched else rewindable)

    return put_back
