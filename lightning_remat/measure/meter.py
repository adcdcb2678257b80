"""Peak memory by one definition: bytes that an allocator has handed out, storage by storage (CPU) or by its own figure.

On fake tensors nothing is allocated: it is the bytes of their storages.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from ..devices import (
    HOST,
    allocated_bytes,
    await_releases,
    counts_memory,
    empty_cache,
    most_bytes,
    start_counting,
    synchronize,
)
from ..module_state.sharding import gathered_tensors, gathering_units, groups_of, last_gathered_bytes
from ..module_state.watching import WatchingMode
from .allocated_growth import Peak, can_listen, heard, listen
from .resident_memory import ResidentGrowth


@contextmanager
def measure_peak(
    device: torch.device | str | None = None,
    include: Iterable[Tensor | nn.Module] = (),
    *,
    with_scratch: bool = False,
    with_kernels: bool = True,
) -> Generator[Peak, None, None]:
    """Measures the peak memory of a block of code.

    On the CPU and on fake tensors it is the sum of the bytes of all live storages that `include` names or that an
    operation of the block made, and of what its kernel holds inside itself meanwhile. On a device it is the allocator's
    own figure, which counts all that is alive.

    >>> x = torch.zeros(256)
    >>> with measure_peak(include=[x]) as measured:
    ...     y = (x + 1) * 2
    >>> measured.peak_bytes  # x, x + 1 and y, 1024 bytes each
    3072

    Args:
        device: Where the block allocates; None stands for the CPU and for fake tensors of any device.
        include: Tensors alive from the start; a module stands for its parameters, their gradients and its buffers.
        with_scratch: Whether all counts that the device must have for the block: on the CPU what kernels use beside
            tensors, as far as the system tells; on a device what the allocator reserves, fragmentation included.
        with_kernels: Whether what kernels allocate inside themselves counts on the CPU, where no other profiler runs.

    Yields:
        A `Peak`, whose `peak_bytes` is set when the block ends.
    """
    measured = Peak()
    device = HOST if device is None else torch.device(device)
    if counts_memory(device):
        synchronize(device)
        await_releases(device)  # before what is alive is counted
        if with_scratch:
            empty_cache(device)
        start_counting(device)
        measured.start_bytes = allocated_bytes(device)
        try:
            yield measured
        finally:
            synchronize(device)
            measured.peak_bytes = most_bytes(device, reserved=with_scratch)
        return
    meter = _meter_of(include, with_kernels=with_kernels)
    measured.start_bytes = meter.alive_bytes
    resident = ResidentGrowth() if with_scratch and device.type == "cpu" else None
    try:
        with meter:
            yield measured
    finally:
        measured.peak_bytes = meter.finish()
        if resident is not None:
            measured.peak_bytes = max(measured.peak_bytes, measured.start_bytes + resident.finish())


@contextmanager
def measure_growth(
    device: torch.device, include: Iterable[Tensor | nn.Module] = (), **what: bool
) -> Generator[Peak, None, None]:
    """Measures by how much the memory of a block exceeds what was alive at its start, at most.

    Args:
        device: Where the block allocates; for fake tensors the CPU.
        include: Tensors alive at the start that may die inside; only needed where storages are counted.
        **what: See `measure_peak`.

    Yields:
        A `Peak`, whose `peak_bytes` is the growth.
    """
    with measure_peak(device, include, **what) as measured:
        yield measured
    measured.peak_bytes -= measured.start_bytes


def _meter_of(include: Iterable[Tensor | nn.Module], *, with_kernels: bool) -> StorageMeter:
    """A meter that counts what is included, and holds none of it."""
    tensors: list[Tensor] = []
    units: list[Any] = []
    for item in include:
        if isinstance(item, nn.Module):
            tensors += [t for p in item.parameters() for t in (p, p.grad) if t is not None]
            tensors += item.buffers()
            units += gathering_units(item)
        else:
            tensors.append(item)
    is_real = bool(tensors) and active_fake_mode() is None and not any(isinstance(t, FakeTensor) for t in tensors)
    meter = StorageMeter(with_kernels=with_kernels, is_real=is_real)
    for tensor in tensors:
        meter.add(tensor)
    meter.watch(group for unit in units for group in groups_of(unit))
    return meter


def tensor_storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor, or None for layouts that have none of their own (sparse, wrappers).

    A tensor that is spread over processes stands for the part that lies here.
    """
    tensor = getattr(tensor, "_local_tensor", tensor)
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a wrapper subclass has no storage: what it wraps is seen itself
        return None


_COLLECTIVE_RELEASES_SECONDS = 1e-3
"""A backend's thread holds the tensors of a collective until it is scheduled once more, which nothing tells."""

_DEVICE: Any = torch.ops.prim.device.default
"""Of a fake tensor, autograd and kernels ask the device more often than all else together; nothing is made by that."""


class StorageMeter(WatchingMode):
    """Sums the bytes of live storages, which it meets as results of operations and sees die.

    Args:
        with_kernels: Whether it listens to the allocator while an operation runs.
        is_real: Whether fake tensors are not what is metered: they are made where a module is captured anew meanwhile.
    """

    def __init__(self, *, with_kernels: bool, is_real: bool) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.with_kernels, self.is_real = with_kernels, is_real
        self.alive_bytes = 0
        self.peak_bytes = 0
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._pending: tuple[weakref.ref[torch.UntypedStorage], int] | None = None
        self._follows_collective = False
        self._groups: list[Any] = []
        self._gathered_bytes: list[int] = []  # of each group's last tensor, when it was looked at

    def watch(self, groups: Iterable[Any]) -> None:
        """Counts what groups of parameters are gathered into, whose storages grow and shrink without an operation."""
        self._groups += groups
        self._gathered_bytes += [0] * (len(self._groups) - len(self._gathered_bytes))
        self._look_at_groups()

    def _look_at_groups(self) -> None:
        found = last_gathered_bytes(self._groups)
        if found == self._gathered_bytes:
            return
        for group, size, before in zip(self._groups, found, self._gathered_bytes, strict=True):
            if size != before:
                for tensor in gathered_tensors(group):
                    self.add(tensor)
        self._gathered_bytes = found

    def add(self, tensor: Tensor) -> None:
        """Counts the storage of `tensor`, if it is not counted yet, from now to its death."""
        storage = tensor_storage(tensor)
        if storage is not None and (known := self._counted_bytes(storage)) != storage.nbytes():
            self.alive_bytes += storage.nbytes() - (known or 0)  # it may have been resized in place
            key = storage._cdata  # pyright: ignore[reportPrivateUsage]
            self._alive[key] = (weakref.ref(storage, self._on_death(key)), storage.nbytes())

    def _counted_bytes(self, storage: torch.UntypedStorage) -> int | None:
        """What is counted of a storage; None where it is not."""
        known = self._alive.get(storage._cdata)  # pyright: ignore[reportPrivateUsage]
        return known[1] if known is not None and known[0]() is storage else None

    def _on_death(self, key: int) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
            known = self._alive.get(key)
            if known is not None and known[0] is reference:
                del self._alive[key]
                self.alive_bytes -= known[1]

        return forget

    def runs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Counts what an operation makes, and what its kernel holds meanwhile."""
        if func is _DEVICE:
            return func(*args)
        if self._follows_collective:
            time.sleep(_COLLECTIVE_RELEASES_SECONDS)
        self._follows_collective = func.namespace == "c10d"
        self._settle()
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        before_bytes = self.alive_bytes
        result, inside_bytes = self._run(func, operands, args, kwargs)
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if self.is_real:
            made = [t for t in made if not isinstance(t, FakeTensor)]
        if made:
            foreign = {id(s) for s in map(tensor_storage, operands) if s is not None}
            for t in made:
                storage = tensor_storage(t)
                # A view of a tensor that nobody included, or such a tensor written in place, is not made here.
                if storage is not None and (id(storage) not in foreign or self._counted_bytes(storage) is not None):
                    self.add(t)
        total = _accumulates_gradient(func, args)
        if total is None:
            self.peak_bytes = max(self.peak_bytes, self.alive_bytes, before_bytes + inside_bytes)
        else:
            self._pending = (weakref.ref(total), self.alive_bytes)
        return result

    def _run(self, func: Any, operands: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """The result of an operation, and how many bytes its kernel held at most, the result's among them."""
        # Fake kernels allocate for themselves alone; what makes a tensor out of nothing makes no other. Buffers of
        # a collective are its backend's, which threads of its own let go of: they would be heard now and then.
        is_heard = self.with_kernels and operands and func.namespace != "c10d"
        if not is_heard or any(isinstance(t, FakeTensor) for t in operands):
            return func(*args, **kwargs), 0
        if not can_listen():  # a meter around this one does, or what runs inside profiles itself
            return func(*args, **kwargs), 0
        listen()
        try:
            result = func(*args, **kwargs)
        finally:
            inside_bytes = heard()
        return result, inside_bytes

    def _settle(self) -> None:
        """Counts a pending sum of gradients, unless autograd would have added in place.

        Autograd adds in place to a gradient that nobody else holds, but not under a dispatch mode, such as this
        meter or fake tensors are. The sum made out of place then frees its first term at once.
        """
        if self._pending is not None:
            first, alive_bytes = self._pending
            if first() is not None:
                self.peak_bytes = max(self.peak_bytes, alive_bytes)
            self._pending = None
        if self._groups:
            self._look_at_groups()
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)

    def finish(self) -> int:
        """The peak, all events counted."""
        self._settle()
        return self.peak_bytes


def _accumulates_gradient(func: Any, args: tuple[Any, ...]) -> torch.UntypedStorage | None:
    """The storage of the first term, if this is an addition that autograd would do in place when it may."""
    if func is not torch.ops.aten.add.Tensor or torch._C._current_graph_task_id() == -1:  # pyright: ignore
        return None
    first = cast(Tensor, args[0])
    storage = tensor_storage(first)
    if storage is None or first.numel() * first.element_size() != storage.nbytes():
        return None  # a part of a larger storage is never added to in place
    return storage
