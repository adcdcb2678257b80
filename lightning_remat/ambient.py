"""What a run depends on besides its inputs: autocast, default device, algorithms, random states, buffers."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_local = threading.local()


def is_recomputing() -> bool:
    """Whether the code that asks runs in a recomputation, for modules with effects that must happen once.

    >>> is_recomputing()
    False
    """
    return getattr(_local, "depth", 0) > 0


@contextmanager
def recomputing() -> Generator[None, None, None]:
    """Marks what runs inside, in this thread, as a recomputation."""
    _local.depth = getattr(_local, "depth", 0) + 1
    try:
        yield
    finally:
        _local.depth -= 1


@dataclass(frozen=True, slots=True)
class Ambient:
    """The settings under which a forward ran."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    is_cache_enabled: bool
    default_device: torch.device
    algorithms: tuple[bool, bool, bool, bool, bool]

    @classmethod
    def current(cls, device_types: Iterable[str]) -> Ambient:
        """The settings in force now, autocast for the given types of device."""
        autocast = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types)
        cudnn = torch.backends.cudnn
        algorithms = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            bool(cudnn.enabled),
            bool(cudnn.benchmark),
            bool(cudnn.deterministic),
        )
        return cls(autocast, torch.is_autocast_cache_enabled(), torch.get_default_device(), algorithms)

    @contextmanager
    def restored(self) -> Generator[None, None, None]:
        """These settings, where they differ from those in force."""
        now = Ambient.current(d for d, _, _ in self.autocast)
        with ExitStack() as stack:
            if now.autocast != self.autocast:
                for device_type, enabled, dtype in self.autocast:
                    autocast = torch.autocast(device_type, dtype, enabled, cache_enabled=self.is_cache_enabled)
                    stack.enter_context(autocast)
            if now.default_device != self.default_device:
                stack.enter_context(self.default_device)
            if now.algorithms != self.algorithms:
                stack.callback(_set_algorithms, now.algorithms)
                _set_algorithms(self.algorithms)
            yield


def _set_algorithms(algorithms: tuple[bool, bool, bool, bool, bool]) -> None:
    torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])
    cudnn = torch.backends.cudnn
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = algorithms[2:]


class RandomState:
    """The state of the CPU's generator and of those of some devices, to return to."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.cpu = torch.get_rng_state()
        self.others = [(d, torch.get_device_module(d).get_rng_state(d)) for d in devices]

    def put_back(self) -> None:
        """Sets the generators to this state."""
        torch.set_rng_state(self.cpu)
        for device, state in self.others:
            torch.get_device_module(device).set_rng_state(state, device)

    @contextmanager
    def replayed(self) -> Generator[None, None, None]:
        """Draws from this state inside, and from where the generators stood afterwards."""
        now = RandomState(d for d, _ in self.others)
        self.put_back()
        try:
            yield
        finally:
            now.put_back()


def buffer_values(module: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Copies of the named buffers."""
    return {name: module.get_buffer(name).detach().clone() for name in names}


@contextmanager
def scratch_buffers(module: nn.Module, names: Iterable[str], values: dict[str, Tensor]) -> Generator[None, None, None]:
    """Copies in the place of the named buffers, so that a run inside leaves the buffers themselves untouched.

    Writing the old values back would raise the version counter of tensors that autograd may have saved.

    Args:
        module: Their owner.
        names: Dotted names of buffers.
        values: The values that the run shall see; the present ones where a name is missing.
    """
    owners: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    for name in names:
        path, _, leaf = name.rpartition(".")
        buffers = module.get_submodule(path)._buffers  # pyright: ignore[reportPrivateUsage]
        original = buffers[leaf]
        assert original is not None, name
        owners.append((buffers, leaf, original))
        buffers[leaf] = values.get(name, original).detach().clone()
    try:
        yield
    finally:
        for buffers, leaf, original in owners:
            buffers[leaf] = original
