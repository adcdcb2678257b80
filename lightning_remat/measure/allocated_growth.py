"""What PyTorch's allocator for the host hands out in a block, kernels' own tensors included.

A mode that sees operations does not see what a kernel allocates inside itself: a contiguous copy in a backward,
oneDNN's scratch. The allocator tells the profiler of it, event by event.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig  # pyright: ignore[reportPrivateUsage]

from .meter import Peak

_ALLOCATION = "memory_alloc"


class HostAllocations:
    """Listens to the allocator, in this thread, while it is entered.

    The size of what is freed is known only if it was heard when that was allocated; what was not heard is taken for
    what lay at its address before. So whoever measures several blocks listens between them, too.

    Raises:
        RuntimeError: Another profiler is running.
    """

    def __enter__(self) -> HostAllocations:
        """Begins to listen."""
        _listen()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends it."""
        _heard()

    @contextmanager
    def growth(self) -> Generator[Peak]:
        """Measures by how much what is allocated in a block exceeds what was allocated at its start, at most.

        Unlike a meter of storages this changes nothing of how autograd sums gradients.

        Yields:
            A `Peak`, whose `peak_bytes` is the growth.
        """
        self._since_before()
        measured, alive = Peak(), 0
        try:
            yield measured
        finally:
            for size in self._since_before():
                alive += size
                measured.peak_bytes = max(measured.peak_bytes, alive)

    def _since_before(self) -> list[int]:
        """Bytes allocated, or freed if negative, since the last call, in order."""
        sizes = _heard()
        _listen()
        return sizes


def _listen() -> None:
    autograd: Any = torch.autograd
    flags = (False, True, False, False, False)  # of these only `profile_memory`
    autograd._enable_profiler_legacy(autograd.ProfilerConfig(autograd.ProfilerState.CPU, *flags, _ExperimentalConfig()))


def _heard() -> list[int]:
    autograd: Any = torch.autograd
    events = (event for thread in autograd._disable_profiler_legacy() for event in thread)
    return [event.cpu_memory_usage() for event in events if event.kind() == _ALLOCATION]


@contextmanager
def measure_allocated_growth() -> Generator[Peak]:
    """The growth of one block, from which what was made before it and dies in it is not subtracted."""
    with HostAllocations() as allocations, allocations.growth() as measured:
        yield measured
