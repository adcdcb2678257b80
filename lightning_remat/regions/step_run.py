"""One forward and backward of a module that leaves no trace: what `rematerialize` measures and compares."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..devices import HOST, device_of, random_state
from ..measure.meter import measure_growth
from ..module_state.nesting import tensors_in
from ..module_state.preserve import preserved_random, record
from ..module_state.sharding import has_units, settled
from .calls import detached
from .footprint import storage_bytes


@contextmanager
def untouched(module: nn.Module, *inputs: Any) -> Generator[None]:
    """What the block does to parameters, buffers, attributes, gradients and random states is undone.

    Args:
        module: What the block calls.
        *inputs: What it is called with; where these are fake tensors, the block runs in their mode.
    """
    fake = next((t for t in tensors_in(inputs) if isinstance(t, FakeTensor)), None)
    with settled(module):  # before it is recorded
        pass
    put_back = record([module])
    with preserved_random() if fake is None else nullcontext():  # fake operations draw nothing
        try:
            with settled(module), torch.enable_grad(), nullcontext() if fake is None else fake.fake_mode:
                yield
        finally:
            put_back()


class _Loss(torch.autograd.Function):
    """Holds the outputs until their backward, then makes a gradient for each, as a loss does."""

    @staticmethod
    def forward(ctx: Any, gradient_of: Callable[[Tensor], Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradient_of = gradient_of
        ctx.save_for_backward(*outputs)
        return outputs[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *(ctx.gradient_of(t) for t in ctx.saved_tensors)


def run_backward(
    outputs: list[Tensor], targets: list[Tensor], gradient_of: Callable[[Tensor], Tensor], *, is_sharded: bool = False
) -> tuple[Tensor | None, ...]:
    """The gradients of the targets; nothing is added to `.grad`, and no hook of an accumulation fires.

    Shards have their gradients from a whole backward alone: it fires, and what was in `.grad` is lost.

    Args:
        outputs: Emptied, so that they live no longer than in a training step.
        targets: Parameters and inputs with gradients.
        gradient_of: The gradient of an output.
        is_sharded: Whether the targets are shards.
    """
    if is_sharded:
        for t in targets:
            t.grad = None
    loss = _Loss.apply(gradient_of, *outputs)
    outputs.clear()
    if is_sharded:
        loss.backward()
        return tuple(t.grad for t in targets)
    return torch.autograd.grad(loss, targets, allow_unused=True)  # pyright: ignore[reportArgumentType]


def step_outcome(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """All that one forward and backward produce, by name; undone afterwards."""
    args, kwargs = detached((args, kwargs))
    inputs = {f"input {i}": t for i, t in enumerate(tensors_in((args, kwargs)))}
    targets = {name: t for name, t in {**dict(module.named_parameters()), **inputs}.items() if t.requires_grad}
    with untouched(module, args, kwargs):
        outputs = tensors_in(module(*args, **kwargs))
        found = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
        outputs = [t for t in outputs if t.requires_grad]
        gradients: tuple[Tensor | None, ...] = ()
        if outputs:
            gradients = run_backward(outputs, list(targets.values()), _ramp, is_sharded=has_units(module))
        found |= {f"gradient of {name}": g for name, g in zip(targets, gradients, strict=False) if g is not None}
        found |= {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
        devices = {t.device for t in (*inputs.values(), *targets.values()) if not isinstance(t, FakeTensor)}
        found |= {f"random state of {device}": random_state(device) for device in {HOST, *devices}}
    return found


def _ramp(t: Tensor) -> Tensor:
    """Gradients that differ from element to element: what is the same for all may cancel."""
    return torch.linspace(-1, 1, t.numel(), dtype=t.dtype, device=t.device).reshape(t.shape)


def step_peak(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Measured peak in bytes of one forward and backward: parameters, buffers, inputs, outputs and all between."""
    args, kwargs = detached((args, kwargs))
    inputs = tensors_in((args, kwargs))
    targets = [t for t in (*module.parameters(), *inputs) if t.requires_grad]
    is_fake = any(isinstance(t, FakeTensor) for t in inputs)
    device = HOST if is_fake else device_of((*inputs, *targets))
    alive = [*module.parameters(), *module.buffers(), *inputs]
    with untouched(module, inputs), measure_growth(device, include=alive) as growth:
        outputs = [t for t in tensors_in(module(*args, **kwargs)) if t.requires_grad]
        gradients = run_backward(outputs, targets, torch.ones_like, is_sharded=has_units(module))
        del gradients
    return storage_bytes(alive) + growth.peak_bytes
