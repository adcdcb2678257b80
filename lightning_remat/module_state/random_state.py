"""Random generators: their states put back, and what an operation drew drawn again."""

from __future__ import annotations

import operator
import random
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils._mode_utils import no_dispatch

from ..devices import HOST, devices_in_use, random_state_methods
from .ambient import num_dispatch_modes

generators_in_use = threading.RLock()
"""Held where a state is read or set around an operation: the generators are shared by all threads."""

_local = threading.local()


class Source(NamedTuple):
    """A random generator: its name in messages, how its state is read and set, and when two states are one."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    same: Callable[[Any, Any], bool]


class RandomState:
    """The state of some generators, to return to."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._states = [(source, source.read()) for source in sources]

    @classmethod
    def of_all(cls, *, with_torch: bool = True) -> RandomState:
        """That of Python's generator, numpy's and, unless that is left out, torch's on every device."""
        return cls([*HOST_GENERATORS, *device_generators(devices_in_use() if with_torch else ())])

    def put_back(self) -> None:
        """Sets the generators to this state."""
        for source, state in self._states:
            source.write(state)

    @contextmanager
    def restored(self) -> Generator[None]:
        """Sets them to it after the block."""
        try:
            yield
        finally:
            self.put_back()

    def is_current(self) -> bool:
        """Whether none of them has drawn since."""
        return all(source.same(source.read(), state) for source, state in self._states)


def preserved_random(*, with_torch: bool = True) -> AbstractContextManager[None]:
    """Restores the random states of python, numpy and, unless that is left out, torch on every device."""
    return RandomState.of_all(with_torch=with_torch).restored()


def drawn_from(devices: Iterable[torch.device]) -> list[Source]:
    """The generators from which operations of this thread draw: that of the CPU, and those of the devices."""
    return getattr(_local, "drawn_from", device_generators)([HOST, *devices])


class Draws:
    """The random numbers of one run of an operation, and of runs that draw them again.

    Each run has the generators for itself until it has ended. Their methods are called around very many operations, so
    that they are no contexts.

    Args:
        sources: The generators that the first run, which begins now, may use.
    """

    __slots__ = ("_begun", "_drawn", "_now")

    def __init__(self, sources: Sequence[Source]) -> None:
        self._now: list[Any] = []
        self._drawn: list[tuple[Source, Any, Any]] = []  # with the states before and after
        generators_in_use.acquire()
        try:
            self._begun = [(source, source.read()) for source in sources]
        except BaseException:
            generators_in_use.release()
            raise

    def end(self) -> None:
        """The first run has ended."""
        try:
            self._drawn = [(source, before, source.read()) for source, before in self._begun]
        finally:
            generators_in_use.release()

    def begin_again(self) -> None:
        """Sets the generators to where they stood before the first run."""
        if len(self._drawn) > 1:  # to set a single one costs less than to find out whether it has drawn
            self._drawn = [(s, before, after) for s, before, after in self._drawn if not s.same(before, after)]
        generators_in_use.acquire()
        try:
            self._now = [source.read() for source, _, _ in self._drawn]
            for source, before, _ in self._drawn:
                source.write(before)
        except BaseException:
            self._put_back()
            raise

    def end_again(self, *, has_failed: bool = False) -> None:
        """Puts them back to where they stood when that run began.

        Args:
            has_failed: Whether it ended with an error: then it need not have drawn everything.

        Raises:
            RuntimeError: It has drawn other numbers.
        """
        try:
            differ = [] if has_failed else [s.name for s, _, after in self._drawn if not s.same(s.read(), after)]
        finally:
            self._put_back()
        if differ:
            raise RuntimeError(
                f"a recomputation drew other random numbers from {', '.join(differ)} than the first run: another "
                "thread draws from the same generator, or the operation does not do the same twice. Remedy: draw from "
                "a generator of its own in the other thread, or leave the operation out of the rewritten modules"
            )

    def _put_back(self) -> None:
        now, self._now = self._now, []
        try:
            for (source, _, _), state in zip(self._drawn, now, strict=False):  # none, if reading them failed
                source.write(state)
        finally:
            generators_in_use.release()


@contextmanager
def drawing_from(sources: Callable[[Iterable[torch.device]], list[Source]]) -> Generator[None]:
    """What operations of this thread draw from within the block, given devices, in place of `device_generators`."""
    before = getattr(_local, "drawn_from", device_generators)
    _local.drawn_from = sources
    try:
        yield
    finally:
        _local.drawn_from = before


def device_generators(devices: Iterable[torch.device]) -> list[Source]:
    """Those from which all draw who name none."""
    return [_generator_of_device(device) for device in devices]


@cache
def _generator_of_device(device: torch.device) -> Source:
    return Source(f"the generator of {device}", *random_state_methods(device), _same_tensor)


def generator_of(value: object) -> Source | None:
    """A random generator of the user's own; None for other objects."""
    if isinstance(value, torch.Generator):
        return Source("a generator of torch", value.get_state, value.set_state, _same_tensor)
    if isinstance(value, random.Random):
        return Source("a generator of Python", value.getstate, value.setstate, operator.eq)
    if isinstance(value, np.random.RandomState):
        return Source("a generator of numpy", partial(value.get_state, legacy=False), value.set_state, _same_numpy)
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return Source("a generator of numpy", lambda: bits.state, partial(setattr, bits, "state"), _same_numpy)
    return None


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not num_dispatch_modes():  # to turn off what is not there takes as long as to compare
        return torch.equal(a, b)
    with no_dispatch():
        return torch.equal(a, b)


def _same_numpy(a: Any, b: Any) -> bool:
    """Whether nested dictionaries are equal that hold arrays."""
    if isinstance(a, dict):
        ours, theirs = cast(dict[str, Any], a), cast(dict[str, Any], b)
        return all(_same_numpy(value, theirs[key]) for key, value in ours.items())
    return bool(np.array_equal(a, b))


HOST_GENERATORS = (
    Source("Python's generator", random.getstate, random.setstate, operator.eq),
    # numpy's global state is the one that users' data sets draw from.
    Source("numpy's generator", partial(np.random.get_state, legacy=False), np.random.set_state, _same_numpy),
)
