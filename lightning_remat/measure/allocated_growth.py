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


@contextmanager
def measure_allocated_growth() -> Generator[Peak]:
    """Measures by how much the allocations of this thread exceed what was allocated at the start, at most.

    What was made before the block and dies in it is not subtracted: the allocator does not know its size. Unlike a
    meter of storages this changes nothing of how autograd sums gradients.

    Yields:
        A `Peak`, whose `peak_bytes` is the growth.

    Raises:
        RuntimeError: Another profiler is running.
    """
    autograd: Any = torch.autograd
    flags = (False, True, False, False, False)  # of these only `profile_memory`
    autograd._enable_profiler_legacy(autograd.ProfilerConfig(autograd.ProfilerState.CPU, *flags, _ExperimentalConfig()))
    measured, alive = Peak(), 0
    try:
        yield measured
    finally:
        for event in (e for thread in autograd._disable_profiler_legacy() for e in thread):
            if event.kind() == _ALLOCATION:
                alive += event.cpu_memory_usage()
                measured.peak_bytes = max(measured.peak_bytes, alive)
