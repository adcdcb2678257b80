"""The memory that the process really takes: what the CPU's kernels use beside tensors is in it."""

from __future__ import annotations

import ctypes
import os
import re
from functools import cache
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # man 5 proc_pid_clear_refs


class ResidentGrowth:
    """Measures by how much the resident memory of the process exceeds that at its start, at most.

    Convolutions on the CPU copy their operands into the layout of their kernels. This scratch memory is as large as
    activations and belongs to no tensor, so nothing that counts tensors sees it; the kernel of Linux does. Exact to a
    few pages for a block that runs alone; the first run of an operation also counts the code made for it.

    """

    def __init__(self) -> None:
        self._start_bytes: int | None = None
        if can_measure_resident():
            release_unused()
            _CLEAR.write_text(_RESET_PEAK)
            self._start_bytes = _status_bytes("VmRSS")

    def finish(self) -> int:
        """The growth up to now; 0 where the system does not tell."""
        return 0 if self._start_bytes is None else max(0, _status_bytes("VmHWM") - self._start_bytes)


@cache
def can_measure_resident() -> bool:
    """Whether the system tells a process its peak of resident memory, and lets it start anew (Linux with glibc)."""
    return _STATUS.exists() and os.access(_CLEAR, os.W_OK) and _trim() is not None


def release_unused() -> None:
    """Hands memory that the C library holds free back to the system, so that taking it again is seen."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> ctypes._NamedFuncPointer | None:  # pyright: ignore[reportPrivateUsage]
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert found is not None, f"no {field} in {_STATUS}"
    return int(found[1]) * 1024
