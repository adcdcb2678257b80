"""How much memory a device has, and how much of it is free."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from ..devices import limited, memory_info
from .resident_memory import release_unused


class DeviceMemory(NamedTuple):
    """Bytes of a device.

    Attributes:
        free_bytes: What a process can still take, what its own caching allocator holds unused included.
        total_bytes: What the device has.
    """

    free_bytes: int
    total_bytes: int


def device_memory(device: torch.device) -> DeviceMemory:
    """The memory of a device, and what of it is free for this process.

    On a device with memory of its own what `devices.memory_info` tells; otherwise the least of the machine's memory, of
    what its control groups allow, and of what `RLIMIT_AS` leaves of the address space.
    """
    if (of_device := memory_info(device)) is not None:
        return DeviceMemory(*of_device)
    release_unused()
    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    for limit, used in control_group_limits():
        total, free = min(total, limit), min(free, max(0, limit - used))
    address_space = _address_space_limit()
    if address_space is not None:
        total, free = min(total, address_space), min(free, max(0, address_space - psutil.Process().memory_info().vms))
    return DeviceMemory(free, total)


@contextmanager
def enforced(device: torch.device, budget_bytes: int, alive_bytes: int) -> Generator[None]:
    """The block runs out of memory where it takes more than the budget, as far as the system can be told so.

    On a device that knows a process's fraction that fraction is lowered. On the host that is done with `RLIMIT_AS`
    where the process has such a limit, so that what no figure of memory tells is in it: code, stacks, gaps.

    Args:
        device: Where the block runs.
        budget_bytes: What it may take, `alive_bytes` included.
        alive_bytes: What of the budget is taken already.
    """
    address_space = _address_space_limit()
    if device.type != "cpu":
        with limited(device, budget_bytes):
            yield
    elif address_space is None:
        yield
    else:
        import resource  # of Unix alone, as the limit is

        release_unused()
        least = psutil.Process().memory_info().vms + max(0, budget_bytes - alive_bytes)
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (min(least, address_space), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space_limit() -> int | None:
    """What `RLIMIT_AS` allows the process in bytes; None where nothing is limited, or the system has no such limit."""
    try:
        import resource  # of Unix alone
    except ImportError:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


_UNLIMITED = 1 << 60
"""Version 1 writes the largest number of pages for no limit."""


def control_group_limits(
    root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> list[tuple[int, int]]:
    """(limit, use) in bytes of every control group above the process that limits memory, of version 2 or 1.

    Files that were read and are kept in case they are read again, as data sets are, count as free.

    Args:
        root: Where the control groups are mounted.
        groups: Names the groups of the process, one hierarchy a line.
    """
    found: list[tuple[int, int]] = []
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit_name, use_name, idle_name = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit_name, use_name = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            idle_name = "total_inactive_file"
        else:
            continue
        group = mount / path.lstrip("/")
        # In a container the mount's root is the container's own group, and the path that is named may not exist there.
        for folder in dict.fromkeys([group, *group.parents, mount]):
            limit_file, use_file = folder / limit_name, folder / use_name
            if folder.is_relative_to(mount) and limit_file.exists() and use_file.exists():
                limit = limit_file.read_text().strip()
                if limit.isdigit() and int(limit) < _UNLIMITED:
                    found.append((int(limit), max(0, int(use_file.read_text()) - _idle_bytes(folder, idle_name))))
    return found


def _idle_bytes(folder: Path, name: str) -> int:
    """What a control group uses for content of files that nobody reads now, which goes where memory is wanted."""
    file = folder / "memory.stat"
    figures = dict(line.split() for line in file.read_text().splitlines()) if file.exists() else {}
    return int(figures.get(name, 0))
