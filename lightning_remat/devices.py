"""What is asked of a device, and told it: memory, time, random states. No other file names a kind of device.

CUDA, ROCm, XPU, MPS and the devices that others bring go one way, by `torch.accelerator` and by the device's own module
where that has what the accelerators have not in common. What is done where a device lacks something:

- No figures of an allocator (MPS before PyTorch 2.14): `counts_memory` says so, and storages are counted as on the CPU.
- No memory of its own, or none that it tells: see `memory_info`.
- No fraction that a process may take: all of it, and `limited` limits nothing.
- No generator for a tensor operation: `new_generator` is None, and the device's own is put back instead.
- No `is_initialized`: taken to have started, as asking for a random state starts it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

HOST = torch.device("cpu")

PRECISION_BACKENDS = ("cuda", "mkldnn")
"""The names under which PyTorch keeps the precisions of float32: of devices, and of the host."""


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """The first that is not the host; the host where all tensors are on it."""
    return next((t.device for t in tensors if t.device.type != "cpu"), HOST)


def device_name(device: torch.device) -> str:
    """What the maker calls it, if it tells, or its type."""
    name = getattr(_module(device), "get_device_name", None)
    return device.type if name is None else name(device)


def modules_of_kinds() -> list[Any]:
    """PyTorch's own modules for kinds of devices, whether there is such a device or not."""
    return [torch.cuda, torch.xpu, torch.mps]


# Memory


def counts_memory(device: torch.device) -> bool:
    """Whether an allocator counts what the device has allocated, and the most of it."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return False
    try:
        torch.accelerator.memory_stats(device)
    except RuntimeError:  # its allocator is none that counts
        return False
    return True


def allocated_bytes(device: torch.device) -> int:
    """Bytes that tensors and workspaces take now, on a device that counts them."""
    return torch.accelerator.memory_allocated(device)


def most_bytes(device: torch.device, *, reserved: bool = False) -> int:
    """The most that was allocated since `start_counting`, or that was reserved for it, fragmentation included."""
    most = torch.accelerator.max_memory_reserved if reserved else torch.accelerator.max_memory_allocated
    return most(device)


def await_releases(device: torch.device) -> None:
    """Waits until autograd's thread of the device has let go of what it held for the last backward.

    A backward returns as soon as its gradients are there, and the thread frees the rest while the caller goes on. It
    does one thing after the other: when it answers again, it is done with that.
    """
    with torch.inference_mode(False), torch.enable_grad():
        nothing = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(nothing.view_as(nothing), nothing, torch.empty(0, device=device))


def start_counting(device: torch.device) -> None:
    """Forgets the most that a device has counted."""
    torch.accelerator.reset_peak_memory_stats(device)


def memory_info(device: torch.device) -> tuple[int, int] | None:
    """Bytes that this process can still allocate, and those that it may in all.

    What the allocator holds unused is free, and a process's fraction is a limit. MPS that does not count tells a
    recommended limit and what its driver holds. None where a device tells neither: it is taken to be the host's memory.
    """
    if counts_memory(device):
        free, total = torch.accelerator.get_memory_info(device)
        allocated = torch.accelerator.memory_allocated(device)
        free += torch.accelerator.memory_reserved(device) - allocated
        fraction = getattr(_module(device), "get_per_process_memory_fraction", None)  # MPS and others have none
        allowed = total if fraction is None else int(fraction(device) * total)
        return min(free, max(0, allowed - allocated)), min(total, allowed)
    limit = getattr(_module(device), "recommended_max_memory", None)
    if limit is None:
        return None
    total = int(limit())
    return max(0, total - int(_module(device).driver_allocated_memory())), total


@contextmanager
def limited(device: torch.device, count: int) -> Generator[None]:
    """The process can reserve no more than that many bytes in the block, on a device that can be told so."""
    module = _module(device)
    present = getattr(module, "get_per_process_memory_fraction", None)
    if device.type == "cpu" or present is None:
        yield
        return
    before = present(device)
    fraction = count / torch.accelerator.get_memory_info(device)[1]
    module.set_per_process_memory_fraction(min(before, fraction), device)
    try:
        yield
    finally:
        module.set_per_process_memory_fraction(before, device)


can_exchange_memory = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""Whether storages can exchange their memory, as they can since PyTorch 2.12."""

_C = cast(Any, torch)._C
can_forbid_access = can_exchange_memory and hasattr(_C, "_set_storage_data_ptr_access_error_msg")
"""Whether it can be made an error to read a storage: in builds of PyTorch for CUDA, and on their CPU, too."""


def give_up_memory(storage: torch.UntypedStorage, error: str) -> None:
    """A storage has no memory until it is given some: to read it is the error, where that can be, or a null pointer."""
    storage.resize_(0)
    if can_forbid_access:  # until memory is exchanged
        _C._set_storage_data_ptr_access_error_msg(storage._cdata, error)  # pyright: ignore


def give_memory(storage: torch.UntypedStorage, to: torch.UntypedStorage) -> None:
    """What has given up its memory gets that of a storage, which has none then; where that cannot be, a copy of it."""
    if can_exchange_memory:
        to._swap_data_ptr_(storage)  # pyright: ignore
    else:
        copy_memory(storage, to)


def copy_memory(storage: torch.UntypedStorage, to: torch.UntypedStorage) -> None:
    """What has given up its memory gets a copy of that of a storage."""
    if can_exchange_memory:
        give_memory(torch.UntypedStorage(storage.nbytes(), device=storage.device).copy_(storage), to)
    else:
        to.resize_(storage.nbytes())
        to.copy_(storage)


def most_refilled_bytes(device: torch.device) -> int:
    """How much memory that a storage gave up is allocated and copied to again in less time than hooks cost.

    0 where storages cannot give up their memory. Larger ones keep their hooks also where memory is handed over: their
    kernels take so long that hooks do not count, and what asks a hook too early gets an error.
    """
    return {"cpu": 1 << 18, "cuda": 1 << 24}.get(device.type, 0)


def empty_cache(device: torch.device) -> None:
    """Hands back what the allocator holds unused."""
    if device.type == "cpu":
        return
    own = getattr(_module(device), "empty_cache", None)  # of MPS that does not count, `torch.accelerator`'s raises
    (own or torch.accelerator.empty_cache)()


# Time


def synchronize(device: torch.device) -> None:
    """Waits until all that was asked of the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed_event(device: torch.device) -> torch.Event | None:
    """A point in the work of the device's current stream, whose time is told once it is reached; None on the host."""
    return None if device.type == "cpu" else torch.Event(device, enable_timing=True)


def mark(event: torch.Event, device: torch.device) -> None:
    """Puts an event behind what the current stream of the device has been asked for."""
    event.record(torch.accelerator.current_stream(device))  # without it, of the current device


# Random states


def random_state(device: torch.device) -> Tensor:
    """The state of the device's generator."""
    return random_state_methods(device)[0]()


def random_state_methods(device: torch.device) -> tuple[Callable[[], Tensor], Callable[[Tensor], object]]:
    """What reads the state of the device's generator, and what sets it.

    They are called around every operation that draws: where the generator itself is known, it is asked; the device's
    module first finds out each time whether the device has started.
    """
    if (generator := _default_generator(device)) is not None:
        return generator.get_state, generator.set_state
    module = _module(device)
    return partial(module.get_rng_state, device), lambda state: module.set_rng_state(state, device)


def _default_generator(device: torch.device) -> torch.Generator | None:
    """The one from which all draw who name none; None where the device shows none, or has not started yet."""
    if device.type == "cpu":
        return torch.default_generator
    known: tuple[torch.Generator, ...] = getattr(_module(device), "default_generators", ())
    index = cast("int | None", device.index)
    return known[index] if index is not None and index < len(known) else None


def devices_in_use() -> list[torch.device]:
    """The host, and the process's accelerators if they have been started: those whose random states can have moved."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not getattr(_module(accelerator), "is_initialized", lambda: True)():
        return [HOST]
    return [HOST, *(torch.device(accelerator.type, n) for n in range(torch.accelerator.device_count()))]


def new_generator(device: torch.device) -> torch.Generator | None:
    """A generator of its own on the device; None where a device has none but its own."""
    try:
        return torch.Generator(device)
    except RuntimeError:
        return None


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
