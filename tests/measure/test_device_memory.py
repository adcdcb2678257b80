"""What is free on a device: never more than any of the limits that the process lives under."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_remat.measure import device_memory as module
from lightning_remat.measure.device_memory import control_group_limits, device_memory
from lightning_remat.measure.meter import measure_growth, measure_peak

GIB = 2**30


def write(folder: Path, files: dict[str, int | str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


def test_every_control_group_above_the_process_counts(tmp_path: Path) -> None:
    root, groups = tmp_path / "cgroup", tmp_path / "self"
    groups.write_text("0::/user/job\n")
    write(root / "user/job", {"memory.max": "max", "memory.current": 5})
    write(root / "user", {"memory.max": 8 * GIB, "memory.current": 3 * GIB})
    write(tmp_path, {"memory.max": 1, "memory.current": 0})  # above the mount: none of ours
    assert control_group_limits(root, groups) == [(8 * GIB, 3 * GIB)]


def test_a_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    root, groups = tmp_path / "cgroup", tmp_path / "self"
    groups.write_text("0::/docker/0123\n")
    write(root, {"memory.max": 2 * GIB, "memory.current": GIB})
    assert control_group_limits(root, groups) == [(2 * GIB, GIB)]


def test_files_that_were_read_leave_memory_free(tmp_path: Path) -> None:
    root, groups = tmp_path / "cgroup", tmp_path / "self"
    groups.write_text("0::/job\n4:memory:/job\n")
    cached = f"anon 7\ninactive_file {GIB // 2}\ntotal_inactive_file {GIB // 4}"
    write(root / "job", {"memory.max": 2 * GIB, "memory.current": GIB, "memory.stat": cached})
    limits = {"memory.limit_in_bytes": 4 * GIB, "memory.usage_in_bytes": GIB, "memory.stat": cached}
    write(root / "memory/job", limits)
    assert control_group_limits(root, groups) == [(2 * GIB, GIB // 2), (4 * GIB, 3 * GIB // 4)]


def test_version_1(tmp_path: Path) -> None:
    root, groups = tmp_path / "cgroup", tmp_path / "self"
    groups.write_text("5:cpu:/a\n4:memory:/a\n0::/\n")
    write(root / "memory/a", {"memory.limit_in_bytes": 4 * GIB, "memory.usage_in_bytes": GIB})
    write(root / "memory", {"memory.limit_in_bytes": 2**63 - 4096, "memory.usage_in_bytes": 9 * GIB})  # no limit
    assert control_group_limits(root, groups) == [(4 * GIB, GIB)]


def test_no_control_groups(tmp_path: Path) -> None:
    assert control_group_limits(tmp_path, tmp_path / "missing") == []


def test_a_system_without_limits_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no module `resource`."""
    monkeypatch.setitem(sys.modules, "resource", None)
    free, total = device_memory(torch.device("cpu"))
    assert 0 < free <= total


def test_the_least_of_machine_and_groups_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = device_memory(torch.device("cpu"))
    monkeypatch.setattr(module, "control_group_limits", lambda: [(300 << 20, 100 << 20), (1 << 50, 0)])
    assert device_memory(torch.device("cpu")) == (200 << 20, 300 << 20)
    assert unlimited.free_bytes > 200 << 20
    monkeypatch.setattr(module, "control_group_limits", lambda: [(100, 200)])  # reclaimed in a moment
    assert device_memory(torch.device("cpu")).free_bytes == 0


@pytest.mark.slow
def test_address_space_is_a_limit() -> None:
    code = (
        "import resource, psutil, torch; from lightning_remat.measure.device_memory import device_memory; "
        "limit = psutil.Process().memory_info().vms + (512 << 20); "
        "resource.setrlimit(resource.RLIMIT_AS, (limit,) * 2); "
        "memory = device_memory(torch.device('cpu')); assert memory.total_bytes <= limit, memory; "
        "assert 500 << 20 < memory.free_bytes < 520 << 20, memory"
    )
    if resource.getrlimit(resource.RLIMIT_AS)[1] != resource.RLIM_INFINITY:
        pytest.skip("the address space is limited already")
    subprocess.run([sys.executable, "-c", code], check=True)


CUDA = torch.device("cuda", 0)


class FakeCuda:
    """Stands for CUDA's allocator, as `torch.accelerator` speaks to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fraction: float = 1.0) -> None:
        self.allocated, self.reserved, self.peak, self.peak_reserved = 3 * GIB, 5 * GIB, 0, 0
        self.cached = True
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction)
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty_cache)
        monkeypatch.setattr("lightning_remat.measure.meter.await_releases", lambda device: None)  # no kernel runs there
        for name, read in {
            "current_accelerator": lambda: torch.device("cuda"),
            "synchronize": lambda: None,
            "memory_stats": dict,
            "get_memory_info": lambda: (10 * GIB, 16 * GIB),
            "memory_allocated": lambda: self.allocated,
            "memory_reserved": lambda: self.reserved,
            "max_memory_allocated": lambda: self.peak,
            "max_memory_reserved": lambda: self.peak_reserved,
            "reset_peak_memory_stats": self._reset,
        }.items():
            monkeypatch.setattr(torch.accelerator, name, lambda device=None, read=read: read())

    def _reset(self) -> None:
        self.peak, self.peak_reserved = self.allocated, self.reserved

    def _empty_cache(self) -> None:
        self.reserved, self.cached = self.allocated, False

    def allocate(self, count: int, reserved: int) -> None:
        self.allocated, self.reserved = self.allocated + count, self.reserved + reserved
        self.peak, self.peak_reserved = max(self.peak, self.allocated), max(self.peak_reserved, self.reserved)


def test_what_the_caching_allocator_holds_unused_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    assert device_memory(CUDA) == (12 * GIB, 16 * GIB)


def test_fraction_of_the_process_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, fraction=0.5)
    assert device_memory(CUDA) == (5 * GIB, 8 * GIB)  # 8 GiB are allowed, 3 of them allocated
    FakeCuda(monkeypatch, fraction=0.125)
    assert device_memory(CUDA) == (0, 2 * GIB)


def test_peak_on_cuda_is_allocated_or_with_fragmentation_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    with measure_peak(CUDA) as measured:
        cuda.allocate(GIB, 2 * GIB)
    assert measured.peak_bytes == 4 * GIB
    assert cuda.cached
    with measure_peak(CUDA, with_scratch=True) as measured:
        assert not cuda.cached  # or what an earlier block reserved would count
        cuda.allocate(GIB, 2 * GIB)
    assert measured.peak_bytes == 4 * GIB + 2 * GIB
    cuda = FakeCuda(monkeypatch)
    with measure_growth(CUDA) as growth:
        cuda.allocate(GIB, 2 * GIB)
    assert growth.peak_bytes == GIB
