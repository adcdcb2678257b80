"""How much memory a device has, and how much of it is free."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import NamedTuple

import psutil
import torch


class DeviceMemory(NamedTuple):
    """Bytes of a device.

    Attributes:
        free_bytes: What a process can still take, what its own caching allocator holds unused included.
        total_bytes: What the device has.
    """

    free_bytes: int
    total_bytes: int


def device_memory(device: torch.device) -> DeviceMemory:
    """The memory of a device; on the CPU the least of the machine's, the control group's and the address space's.

    The last is what `RLIMIT_AS` leaves to the process.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return DeviceMemory(free + unused, total)
    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    limit, used = _control_group()
    if limit is not None:
        total, free = min(total, limit), min(free, max(0, limit - used))
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        total, free = min(total, address_space), min(free, max(0, address_space - psutil.Process().memory_info().vms))
    return DeviceMemory(free, total)


def _control_group(root: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int]:
    """Limit and use of the process's control group, version 2 or 1; a limit of None where there is none."""
    for limit_file, use_file in (
        (root / "memory.max", root / "memory.current"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"),
    ):
        if limit_file.exists() and use_file.exists():
            limit = limit_file.read_text().strip()
            if limit.isdigit() and int(limit) < 1 << 60:
                return int(limit), int(use_file.read_text())
    return None, 0
