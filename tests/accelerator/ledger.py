"""Builds and loads the device of the tests: what PyTorch asks of its module, and what tests set and count."""

from __future__ import annotations

import fcntl
import shutil
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

NAME = "ledger"
SOURCE = Path(__file__).parent / "device" / "ledger.cpp"
UNLIMITED = 1 << 40


class MissingToolError(Exception):
    """The device cannot be built on this machine."""


def check_tools() -> None:
    """Whether there is what the device is built by.

    Raises:
        MissingToolError: No compiler, or no ninja.
    """
    from torch.utils import cpp_extension  # every test would wait for it

    for tool in ("ninja", cpp_extension.get_cxx_compiler()):
        if shutil.which(tool) is None:
            raise MissingToolError(f"the device of the tests is built by {tool}, which is not installed")


def load() -> None:
    """Builds the device, unless it is built already, and registers it as `torch.ledger`.

    To be called before the first backward of the process, in which autograd starts its threads for the devices there
    are. Several processes may do so at a time.

    Raises:
        MissingToolError: No compiler, or no ninja.
    """
    from torch.utils import cpp_extension

    check_tools()
    folder = Path(__file__).parent / "build" / torch.__version__
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "building").open("w") as building, warnings.catch_warnings():
        fcntl.flock(building, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)  # PyTorch's, which whoever was killed while building has left behind
        warnings.simplefilter("ignore")  # of the compiler's version
        cpp_extension.load(NAME, str(SOURCE), extra_cflags=["-O1"], build_directory=str(folder), is_python_module=False)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())


def set_limit(count: int, device: int = 0) -> None:
    """From now on the device has that many bytes."""
    torch.ops.ledger.set_limit(device, count)


def shrink(divisor: int) -> None:
    """From now on the allocator's segments are as much smaller, so that a small device has a large one's proportions.

    To be called before the device is used.
    """
    torch.ops.ledger.shrink(divisor)


def num_out_of_memory(device: int = 0) -> int:
    """How often the device has run out of memory."""
    return torch.ops.ledger.num_out_of_memory(device)


@contextmanager
def busy(seconds: float) -> Iterator[None]:
    """Every kernel of the block keeps its device busy for that long after the call has returned."""
    torch.ops.ledger.set_kernel_time(seconds)
    try:
        yield
    finally:
        torch.ops.ledger.set_kernel_time(0.0)


def num_synchronizations() -> int:
    """How often the host has waited for the device."""
    return torch.ops.ledger.num_synchronizations()


def _index(device: int | str | torch.device | None = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _device_module() -> types.ModuleType:
    module = types.ModuleType(f"torch.{NAME}")

    def set_rng_state(state: Tensor, device: int | str | torch.device | None = None) -> None:
        torch.ops.ledger.set_random_state(_index(device), state)

    def set_fraction(fraction: float, device: int | str | torch.device | None = None) -> None:
        torch.ops.ledger.set_fraction(_index(device), fraction)

    def manual_seed_all(seed: int) -> None:
        for index in range(torch.ops.ledger.num_devices()):
            torch.ops.ledger.seed(index, seed)

    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: torch.ops.ledger.num_devices(),  # torch.accelerator's asks this one
        "current_device": torch.accelerator.current_device_index,
        "device": lambda device: torch.accelerator.device_index(_index(device)),
        "set_device": torch.accelerator.set_device_index,
        "synchronize": torch.accelerator.synchronize,
        "get_rng_state": lambda device=None: torch.ops.ledger.random_state(_index(device)),
        "set_rng_state": set_rng_state,
        "manual_seed": lambda seed: torch.ops.ledger.seed(_index(), seed),
        "manual_seed_all": manual_seed_all,
        "set_per_process_memory_fraction": set_fraction,
        "get_per_process_memory_fraction": lambda device=None: torch.ops.ledger.fraction(_index(device)),
        "_is_in_bad_fork": lambda: False,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "get_device_name": lambda device=None: "the tests' device",
    }.items():
        setattr(module, name, value)
    return module
