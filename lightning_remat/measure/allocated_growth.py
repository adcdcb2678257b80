"""What PyTorch's allocator for the host hands out in a block, kernels' own tensors included.

A mode that sees operations does not see what a kernel allocates inside itself: a contiguous copy in a backward,
oneDNN's scratch. The allocator tells the profiler of it, event by event.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig  # pyright: ignore[reportPrivateUsage]

_ALLOCATION = "memory_alloc"

_NUMBER_BYTES = 16
"""What a number takes that an operation makes a tensor of: no more than that is noise, not memory."""


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


def heard() -> int:
    """Ends it, and tells by how many bytes what is allocated has exceeded at most what was when it began.

    What was allocated before and freed since is not subtracted, as its size is not known.
    """
    autograd: Any = torch.autograd
    alive = most = 0
    for thread in autograd._disable_profiler_legacy():
        for event in thread:
            if event.kind() == _ALLOCATION and abs(size := event.cpu_memory_usage()) > _NUMBER_BYTES:
                alive += size
                most = max(most, alive)
    return most
