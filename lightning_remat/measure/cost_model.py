"""Seconds of operations that are not run: counted arithmetic and memory traffic on fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_RATES = {"cpu": (1e11, 1e10), "other": (2e13, 1e12)}
"""Nominal operations a second and bytes a second; only their ratio matters to a planner."""

LAUNCH_SECONDS = 2e-6
"""What an operation costs that moves no data; no node is free, or a planner would recompute it for nothing."""


class CostCounter(TorchDispatchMode):
    """Adds up an estimate of the seconds of all operations inside: the slower of arithmetic and memory traffic."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """TorchDynamo may capture what runs inside: this mode watches and changes nothing."""
        return True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.seconds = 0.0
        self._flops_per_second, self._bytes_per_second = _RATES.get(device.type, _RATES["other"])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        results = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if not results:
            return result
        self.seconds += LAUNCH_SECONDS
        if func.is_view:
            return result
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        traffic = sum(t.numel() * t.element_size() for t in (*operands, *results))
        count = flop_registry.get(func.overloadpacket)
        flops: Any = count(*args, **kwargs, out_val=result) if count is not None else 0
        self.seconds += max(flops / self._flops_per_second, traffic / self._bytes_per_second)
        return result
