"""Random generators: their states put back, and what an operation drew drawn again."""

from __future__ import annotations

import operator
import random
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._mode_utils import no_dispatch

from ..devices import HOST, random_state, set_random_state

generators_in_use = threading.RLock()
"""Held where a state is read or set around an operation: the generators are shared by all threads."""


class RandomState:
    """The state of the CPU's generator and of those of some devices, to return to."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._states = [(source, source.read()) for source in _sources(devices)]

    def put_back(self) -> None:
        """Sets the generators to this state."""
        for source, state in self._states:
            source.write(state)


class Draws:
    """The random numbers of one run of an operation.

    Args:
        devices: Devices whose generators it may use besides the CPU's.
        with_host: Whether it may use the generators of Python and numpy too.
    """

    def __init__(self, devices: Iterable[torch.device], *, with_host: bool) -> None:
        sources = [*_sources(devices), *(_HOST if with_host else ())]
        self._before = [(source, source.read()) for source in sources]
        self._moved: list[tuple[_Source, Any, Any]] = []

    def end(self) -> bool:
        """Notes which generators the run has moved; whether there are any."""
        now = [(source, before, source.read()) for source, before in self._before]
        self._moved = [(source, before, after) for source, before, after in now if not source.same(before, after)]
        self._before.clear()
        return bool(self._moved)

    @contextmanager
    def replayed(self) -> Generator[None, None, None]:
        """Draws the same numbers inside, and goes on from where the generators stood afterwards.

        Raises:
            RuntimeError: The run inside drew others.
        """
        with generators_in_use:
            present = [(source, source.read()) for source, _, _ in self._moved]
            try:
                for source, before, _ in self._moved:
                    source.write(before)
                yield
                differ = [source.name for source, _, after in self._moved if not source.same(source.read(), after)]
            finally:
                for source, state in present:
                    source.write(state)
        if differ:
            raise RuntimeError(
                f"a recomputation drew other random numbers from {', '.join(differ)} than the first run: another "
                "thread draws from the same generator, or the operation does not do the same twice. Remedy: draw from "
                "a generator of its own in the other thread, or leave the operation out of the rewritten modules"
            )


class _Source(NamedTuple):
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    same: Callable[[Any, Any], bool]


def _sources(devices: Iterable[torch.device]) -> list[_Source]:
    return [
        _Source(
            f"the generator of {device}",
            partial(random_state, device),
            partial(set_random_state, device),
            _same_tensor,
        )
        for device in (HOST, *devices)
    ]


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    with no_dispatch():
        return torch.equal(a, b)


def _numpy_state() -> tuple[bytes, tuple[Any, ...], Any]:
    state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - users' code draws from it
    inner = state["state"]
    return inner["key"].tobytes(), (inner["pos"], state["has_gauss"], state["gauss"]), state


def _set_numpy_state(state: tuple[bytes, tuple[Any, ...], Any]) -> None:
    np.random.set_state(state[2])  # noqa: NPY002


def _same_numpy_state(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return a[:2] == b[:2]


_HOST = (
    _Source("Python's generator", random.getstate, random.setstate, operator.eq),
    _Source("numpy's generator", _numpy_state, _set_numpy_state, _same_numpy_state),
)
