"""Seconds of operations that are not run: counted arithmetic and memory traffic on fake tensors."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..module_state.watching import WatchingMode


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a device is taken to be.

    Attributes:
        flops_per_second: Additions and multiplications, each counted.
        bytes_per_second: Read and written.
        launch_seconds: What an operation costs that moves no data; no node is free, or a planner would recompute it
            for nothing.
    """

    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float = 2e-6


_NOMINAL = {"cpu": Speed(1e11, 1e10), "other": Speed(2e13, 1e12)}
"""Where nothing is said; only the ratios matter to a planner."""

_assumed: ContextVar[Speed | None] = ContextVar("assumed speed", default=None)


@contextmanager
def assumed_speed(speed: Speed) -> Generator[None]:
    """Estimates within the block are those of a device of that speed."""
    token = _assumed.set(speed)
    try:
        yield
    finally:
        _assumed.reset(token)


class CostCounter(WatchingMode):
    """Adds up an estimate of the seconds of all operations inside: the slower of arithmetic and memory traffic."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.seconds = 0.0
        self._speed = _assumed.get() or _NOMINAL.get(device.type, _NOMINAL["other"])

    def runs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Adds an operation's seconds."""
        result = func(*args, **kwargs)
        results = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if not results:
            return result
        self.seconds += self._speed.launch_seconds
        if func.is_view:
            return result
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        traffic = sum(t.numel() * t.element_size() for t in (*operands, *results))
        count = flop_registry.get(func.overloadpacket)
        flops: Any = count(*args, **kwargs, out_val=result) if count is not None else 0
        self.seconds += max(flops / self._speed.flops_per_second, traffic / self._speed.bytes_per_second)
        return result
