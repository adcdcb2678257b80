"""What a run depends on besides its inputs: autocast, default device, algorithms, subclasses of tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .algorithms import algorithms_in_force, set_algorithms


class _Local(threading.local):
    depth = 0  # of recomputations within each other


_local = _Local()
_CPU = torch.device("cpu")
_num_modes: Callable[[], int] = torch._C._len_torch_function_stack  # pyright: ignore
_calls_subclasses: Callable[[], bool] = torch._C._is_torch_function_enabled  # pyright: ignore
_CALLS_SUBCLASSES: Any = torch._C.DisableTorchFunctionSubclass, torch._C._EnableTorchFunction  # pyright: ignore
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # pyright: ignore
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled  # pyright: ignore


def is_recomputing() -> bool:
    """Whether the code that asks runs in a recomputation, for modules with effects that must happen once.

    >>> is_recomputing()
    False
    """
    return _local.depth > 0


@dataclass(frozen=True, slots=True)
class Ambient:
    """The settings under which a forward ran.

    Attributes:
        calls_subclasses: Whether what subclasses of tensors have in place of functions (`__torch_function__`) is;
            within a captured graph it is not, as TorchDynamo has captured what that does.
    """

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    is_cache_enabled: bool
    default_device: torch.device
    default_dtype: torch.dtype
    calls_subclasses: bool
    algorithms: tuple[Any, ...]

    @classmethod
    def current(cls, device_types: Iterable[str]) -> Ambient:
        """The settings in force now, autocast for the given types of device."""
        autocast = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types)
        return cls(
            autocast,
            torch.is_autocast_cache_enabled(),
            torch.get_default_device() if _num_modes() else _CPU,  # where one is set it is a mode
            torch.get_default_dtype(),
            _calls_subclasses(),
            algorithms_in_force(),
        )

    def is_current(self) -> bool:
        """Whether these settings are in force."""
        return self == Ambient.current(d for d, _, _ in self.autocast)

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
            if now.default_dtype != self.default_dtype:
                stack.callback(torch.set_default_dtype, now.default_dtype)
                torch.set_default_dtype(self.default_dtype)
            if now.calls_subclasses != self.calls_subclasses:
                stack.enter_context(_CALLS_SUBCLASSES[self.calls_subclasses]())
            if now.algorithms != self.algorithms:
                stack.callback(set_algorithms, now.algorithms, self.algorithms)
                set_algorithms(self.algorithms, now.algorithms)
            yield


class Recomputing:
    """A recomputation, in this thread: under the settings of the forward, with gradients as there.

    It is entered before many a backward, so that it is no generator.

    Args:
        settings: Those of the forward; None where they are in force.
    """

    __slots__ = ("_settings", "_was_enabled")

    def __init__(self, settings: Ambient | None) -> None:
        self._settings = None if settings is None else settings.restored()

    def __enter__(self) -> None:
        """Sets what differs."""
        if self._settings is not None:
            self._settings.__enter__()  # first, as it may fail
        _local.depth += 1
        self._was_enabled = torch.is_grad_enabled()
        if not self._was_enabled:
            set_grad_enabled(True)

    def __exit__(self, *error: Any) -> None:
        """Puts it back."""
        if not self._was_enabled:
            set_grad_enabled(False)
        _local.depth -= 1
        if self._settings is not None:
            self._settings.__exit__(*error)


@contextmanager
def outside_inference() -> Generator[None]:
    """Out of inference mode, in which nothing that autograd may record can be made; without gradients, as in there."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


@contextmanager
def casts_apart() -> Generator[None, None, None]:
    """The casts that autocast keeps for its region do not pass in or out: a fake cast must not serve a real run."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
