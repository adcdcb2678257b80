"""What PyTorch's allocator for the host hands out in a block, kernels' own tensors included.

A mode that sees operations does not see what a kernel allocates inside itself: a contiguous copy in a backward,
oneDNN's scratch. The allocator tells the profiler of it, event by event.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch._C._profiler import _ExperimentalConfig, _RecordFunctionFast  # pyright: ignore[reportPrivateUsage]

_ALLOCATION, _MARK = "memory_alloc", "push"

_FREED = "lightning_remat: freed "
"""What is written among the events of the allocator where something goes that was there before."""

_NUMBER_BYTES = 16
"""What a number takes that an operation makes a tensor of: no more than that is noise, not memory."""

_STATE_BYTES = torch.get_rng_state().numel()
"""Of the host's generator, of which a copy is taken where what is drawn may be drawn again: no tensor of a step."""


@dataclass(slots=True)
class Peak:
    """What a measurement found, final once the block has ended.

    Attributes:
        peak_bytes: The most memory alive at any moment of the block.
        start_bytes: What was alive before it.
    """

    peak_bytes: int = 0
    start_bytes: int = 0


def can_listen() -> bool:
    """Whether the allocator can be listened to in this thread: it tells one profiler at a time."""
    autograd: Any = torch.autograd
    return not autograd._profiler_enabled()


def listen() -> None:
    """Begins to listen to the allocator, in this thread.

    Raises:
        RuntimeError: A profiler is running.
    """
    autograd: Any = torch.autograd
    flags = (False, True, False, False, False)  # of these only `profile_memory`
    autograd._enable_profiler_legacy(autograd.ProfilerConfig(autograd.ProfilerState.CPU, *flags, _ExperimentalConfig()))


def heard(*, without: int = 0) -> int:
    """Ends it, and tells by how many bytes what is allocated has exceeded at most what was when it began.

    What was allocated before and freed since is subtracted where `listened` knows its size, as the allocator does not
    tell that.

    Args:
        without: The size of what is left out.
    """
    autograd: Any = torch.autograd
    alive = most = known = 0
    for thread in autograd._disable_profiler_legacy():
        for event in thread:
            kind = event.kind()
            if kind == _ALLOCATION:
                size = event.cpu_memory_usage()
                is_told_twice, known = size == -known, 0  # as the allocator knows what it handed to another listener
                if abs(size) > _NUMBER_BYTES and abs(size) != without and not is_told_twice:
                    alive += size
                    most = max(most, alive)
            elif kind == _MARK and (name := event.name()).startswith(_FREED):
                known = int(name.removeprefix(_FREED))
                alive -= known
    return most


@contextmanager
def listened(storages: Iterable[torch.UntypedStorage]) -> Generator[Peak]:
    """Measures the peak of a block on the host without a mode that sees operations, under which PyTorch computes some
    of them otherwise: a product with a constant matrix, the backward of `prod`.

    No other profiler may begin inside, in this thread.

    Args:
        storages: What is alive at the start; what of it goes meanwhile is noticed.

    Raises:
        RuntimeError: A profiler is running.
    """
    measured = Peak()
    measured.start_bytes, _watched = _watch(storages)
    del storages  # they shall be able to go
    listen()
    try:
        yield measured
    finally:
        measured.peak_bytes = measured.start_bytes + heard(without=_STATE_BYTES)


def _watch(storages: Iterable[torch.UntypedStorage]) -> tuple[int, list[ref[torch.UntypedStorage]]]:
    """Bytes of storages, and what tells when they go as long as it is held."""
    sizes = [(storage, storage.nbytes()) for storage in storages]
    return sum(size for _, size in sizes), [ref(storage, partial(_mark_as_freed, size)) for storage, size in sizes]


def _mark_as_freed(num_bytes: int, _: ref[torch.UntypedStorage]) -> None:
    with _RecordFunctionFast(f"{_FREED}{num_bytes}"):
        pass
