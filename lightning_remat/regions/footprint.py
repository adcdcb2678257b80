"""Bytes of what is alive beside the rewritten regions: batch, other parameters, optimizer state and its step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..devices import allocated_bytes, counts_memory
from ..measure.cost_model import CostCounter
from ..measure.meter import measure_growth, tensor_storage
from ..measure.stopwatch import Stopwatch
from ..measure.tensor_bytes import storage_bytes
from ..module_state.batches import tensors_held
from ..module_state.nesting import tensors_in
from .calls import Call, View


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = (tensor_storage(t) for t in tensors)
    return {s._cdata: s.nbytes() for s in storages if s is not None}  # pyright: ignore[reportPrivateUsage]


def alive_bytes(device: torch.device, tensors: Iterable[Tensor]) -> int:
    """Bytes alive on the device: what its allocator counts, on the CPU those of these tensors, fake ones left out."""
    if counts_memory(device):
        return allocated_bytes(device)
    return storage_bytes(t for t in tensors if not isinstance(t, FakeTensor))


def optimizer_tensors(optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    """The tensors of the optimizers' states."""
    return [t for optimizer in optimizers for t in tensors_in(list(cast(Any, optimizer.state).values()))]


class OptimizerFootprint(NamedTuple):
    """What the optimizers cost.

    Attributes:
        state_bytes: Their states.
        step_bytes: The peak of their steps, with parameters, buffers and gradients.
        step_seconds: Duration of their steps, an estimate on fake tensors.
    """

    state_bytes: int
    step_bytes: int
    step_seconds: float


def optimizer_footprint(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], device: torch.device
) -> OptimizerFootprint:
    """What the optimizers cost, found by steps on gradients of zero; the caller restores what they change."""
    sparse = {id(m.weight) for m in module.modules() if getattr(m, "sparse", False) is True and hasattr(m, "weight")}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in cast(list[Tensor], group["params"]):
                if parameter.requires_grad:
                    parameter.grad = _no_rows(parameter) if id(parameter) in sparse else torch.zeros_like(parameter)
    step_bytes = 0
    for optimizer in optimizers:
        # Not the peak: a device's allocator counts the batch and other models too.
        alive = [*owned_tensors(module), *optimizer_tensors(optimizers)]
        with measure_growth(device, alive) as growth:
            cast(Callable[..., Any], optimizer.step)(closure=_zero_loss)
        step_bytes = max(step_bytes, storage_bytes(alive) + growth.peak_bytes)
        del alive
    is_fake = any(isinstance(p, FakeTensor) for p in module.parameters())
    watch = CostCounter(device) if is_fake else Stopwatch(device)
    with watch:  # not the first step, which makes the states
        for optimizer in optimizers:
            cast(Callable[..., Any], optimizer.step)(closure=_zero_loss)
    return OptimizerFootprint(storage_bytes(optimizer_tensors(optimizers)), step_bytes, watch.seconds)


def owned_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters, their gradients and buffers."""
    parameters = list(module.parameters())
    return [*parameters, *(p.grad for p in parameters if p.grad is not None), *module.buffers()]


def held_tensors(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], batch: Any) -> list[Tensor]:
    """What of a budget is taken before a step."""
    return [*owned_tensors(module), *optimizer_tensors(optimizers), *tensors_held(batch)]


def _no_rows(parameter: Tensor) -> Tensor:
    """A gradient of zero as an embedding has it that was asked for no row."""
    index = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
    rows = parameter.new_zeros((0, *parameter.shape[1:]))
    return cast(Any, torch).sparse_coo_tensor(index, rows, parameter.shape)


def _zero_loss() -> Tensor:
    return torch.zeros(())


def outside_bytes(module: nn.Module, view: View, batch: Sequence[Tensor]) -> int:
    """What is alive beside the regions throughout a step, less what these count besides; may be negative.

    That is parameters (with gradients), buffers and batch that no region holds, and what the code between the regions
    saves. What else comes into the regions is not alive throughout: `handed_on` tells of that.
    """
    inside: list[Tensor] = []
    for call in view.calls:
        inside += [*call.module.parameters(), *call.module.buffers(), *tensors_held((call.args, call.kwargs))]
    known = _storages(inside)
    parameters = [p for p in module.parameters() if p.requires_grad]
    outside = _storages([*module.parameters(), *module.buffers(), *batch])
    gradients = _storages(parameters)
    owned = sum(size * (2 if key in gradients else 1) for key, size in outside.items() if key not in known)
    return owned + view.saved_bytes - _counted_besides_bytes(view.calls, outside.keys())


def _counted_besides_bytes(calls: Sequence[Call], throughout: Set[int]) -> int:
    """What the regions of a step count when each counts its parameters, buffers and inputs, less what is there of them.

    Args:
        calls: Of the regions.
        throughout: Keys of the storages of parameters, buffers and batch.
    """
    regions = {call.name: call.module for call in calls}
    owned = [[*m.parameters(), *m.buffers()] for m in regions.values()]
    there = _storages(t for tensors in owned for t in tensors)
    counted = sum(storage_bytes(tensors) for tensors in owned)
    for call in calls:
        inputs = _storages(tensors_held((call.args, call.kwargs)))
        counted += sum(inputs.values())
        there |= {key: size for key, size in inputs.items() if key in throughout}
    return counted - sum(there.values())
