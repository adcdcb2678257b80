"""One forward and backward of a module that leaves no trace: what `rematerialize` measures and compares."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..budget import format_bytes
from ..capture.synchronized_norms import unsynchronized
from ..devices import HOST, device_of, empty_cache, random_state
from ..errors import InfeasibleBudgetError
from ..execution.modified import retried
from ..execution.rewriter import num_profiled, programs_in
from ..measure.device_memory import device_memory
from ..measure.meter import measure_growth
from ..measure.out_of_memory import is_out_of_memory
from ..measure.stopwatch import Stopwatch
from ..measure.tensor_bytes import storage_bytes
from ..module_state.batches import detached, record_values, tensors_held
from ..module_state.nesting import tensors_in
from ..module_state.own_draws import OwnDraws
from ..module_state.own_exchanges import exchanging_alone
from ..module_state.preserve import record
from ..module_state.random_state import preserved_random
from ..module_state.sharding import has_units, settle, settled
from ..operations.saved_tensors import nodes_below
from ..profiling.accumulation import copied_as_accumulated
from ..profiling.timing import SHORT_SECONDS
from .self_check import Outcome, fingerprint

logger = logging.getLogger("lightning_remat")

WORTH_ANOTHER = 0.01
"""Room that a tried step leaves in the budget, as a fraction of its peak, that is worth another plan."""

Draws = Literal["put back", "own", "none"]
"""What happens to the states of torch's generators."""

_TIMED_STEPS = 3
"""Of which the fastest counts."""


@contextmanager
def untouched(module: nn.Module, *inputs: Any, draws: Draws = "put back") -> Generator[None]:
    """What the block does to parameters, buffers, attributes, gradients, inputs and random states is undone.

    Args:
        module: What the block calls.
        *inputs: What it is called with; where these are fake tensors, the block runs in their mode.
        draws: What happens to the states of torch's generators, which other threads share: `"put back"`; `"own"` has
            the block draw from generators of its own, `"none"` says that it draws from none.
    """
    fake = next((t for t in tensors_held(inputs) if isinstance(t, FakeTensor)), None)
    settle(module)  # before it is recorded
    put_back, put_back_inputs = record([module]), record_values(tensors_held(inputs))
    if has_units(module):  # whose gradients come from whole backwards, which would add to those that are there
        for parameter in module.parameters():
            parameter.grad = None
    mode = fake.fake_mode if fake is not None else OwnDraws() if draws == "own" else nullcontext()
    with preserved_random(with_torch=draws == "put back") if fake is None else nullcontext():  # fake draws are none
        try:
            with settled(module), unsynchronized(), exchanging_alone(module), torch.enable_grad(), mode:
                yield
        finally:
            put_back()
            put_back_inputs()


class _Loss(torch.autograd.Function):
    """Holds the outputs until their backward, then makes a gradient for each, as a loss does."""

    @staticmethod
    def forward(ctx: Any, gradient_of: Callable[[Tensor], Tensor], shape: Sequence[int], *outputs: Tensor) -> Tensor:
        ctx.gradient_of = gradient_of
        ctx.save_for_backward(*outputs)
        return outputs[0].new_zeros(shape, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *(ctx.gradient_of(t) for t in ctx.saved_tensors)


def run_backward(
    outputs: list[Tensor],
    targets: list[Tensor],
    gradient_of: Callable[[Tensor], Tensor],
    *,
    is_sharded: bool = False,
    loss_shape: Sequence[int] = (),
) -> tuple[Tensor | None, ...]:
    """The gradients of the targets; nothing is added to `.grad`, and no hook of an accumulation fires.

    Shards, and what a reentrant checkpoint recomputes, have their gradients from a whole backward alone: what was in
    `.grad` is lost then, and hooks of shards fire.

    Args:
        outputs: Emptied, so that they live no longer than in a training step.
        targets: Parameters and inputs with gradients.
        gradient_of: The gradient of an output.
        is_sharded: Whether the targets are shards.
        loss_shape: That of the loss, which weighs nothing where it has no elements.
    """
    loss = _Loss.apply(gradient_of, loss_shape, *outputs)
    outputs.clear()
    seed = torch.ones_like(loss)
    if not is_sharded and not _refuses_grad([loss]):
        wanted = [t for t in targets if t.requires_grad]  # the forward may have frozen others
        with copied_as_accumulated(wanted):
            gradients = iter(torch.autograd.grad(loss, wanted, seed, allow_unused=True))
        return tuple(next(gradients) if t.requires_grad else None for t in targets)
    for t in targets:
        t.grad = None
    with nullcontext() if is_sharded else _without_accumulation_hooks(targets):
        loss.backward(seed)  # pyright: ignore[reportUnknownMemberType]
    return tuple(t.grad for t in targets)


def _refuses_grad(roots: Iterable[Tensor]) -> bool:
    """Whether a backward below asks PyTorch if it may differentiate by itself: not when called by `autograd.grad`."""
    for node in nodes_below(roots):
        kind: Any = getattr(node, "_forward_cls", None)
        code = getattr(getattr(kind, "backward", None), "__code__", None)
        if code is not None and "_is_checkpoint_valid" in code.co_names:
            return True
    return False


@contextmanager
def _without_accumulation_hooks(targets: Sequence[Tensor]) -> Generator[None]:
    """An optimizer that makes its step in the backward makes none of these gradients."""
    found = [hooks for t in targets if (hooks := cast(Any, t)._post_accumulate_grad_hooks)]
    kept = [dict(hooks) for hooks in found]
    for hooks in found:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(found, kept, strict=True):
            hooks.update(own)


def step_outcome(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
    """All that one forward and backward produce; undone afterwards."""
    args, kwargs = detached((args, kwargs))
    inputs = {f"input {i}": t for i, t in enumerate(tensors_held((args, kwargs)))}
    targets = {name: t for name, t in {**dict(module.named_parameters()), **inputs}.items() if t.requires_grad}
    with untouched(module, args, kwargs):
        outputs = tensors_in(module(*args, **kwargs))
        found = {f"output {i}": fingerprint(t) for i, t in enumerate(outputs)}
        outputs = [t for t in outputs if t.requires_grad]
        gradients: tuple[Tensor | None, ...] = ()
        if outputs:
            gradients = run_backward(outputs, list(targets.values()), _ramp, is_sharded=has_units(module))
        made = zip(targets, gradients, strict=False)
        found |= {f"gradient of {name}": fingerprint(g) for name, g in made if g is not None}
        found |= {f"buffer {name}": fingerprint(buffer) for name, buffer in module.named_buffers()}
        devices = {t.device for t in (*inputs.values(), *targets.values()) if not isinstance(t, FakeTensor)}
        found |= {f"random state of {device}": fingerprint(random_state(device)) for device in {HOST, *devices}}
    return found


def _ramp(t: Tensor) -> Tensor:
    """Gradients that differ from element to element: what is the same for all may cancel."""
    return torch.linspace(-1, 1, t.numel(), dtype=t.dtype, device=t.device).reshape(t.shape)


def step_peak(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_module_alone: bool = False
) -> int:
    """Measured peak in bytes of one forward and backward: parameters, buffers, inputs, outputs and all between.

    Where something rests in further steps, which this one finds out, one of those is measured as well: autograd holds
    for the sum of a bias's gradient what hooks hand over before. So is one where this one has profiled graphs.

    Args:
        module: What is run, as it is rewritten.
        args: Positional arguments.
        kwargs: Keyword arguments.
        is_module_alone: Whether the loss weighs nothing, and random numbers come from generators of the step's own, so
            that threads which draw meanwhile are left in peace: for a module that is captured as a whole.
    """
    before = num_profiled([module])
    peak = _peak_of_step(module, args, kwargs, is_module_alone)
    if num_profiled([module]) > before:
        peak = _peak_of_step(module, args, kwargs, is_module_alone)
    if any(program.variants and program.variants[-1].rests.unproven for program in programs_in(module)):
        return max(peak, _peak_of_step(module, args, kwargs, is_module_alone))
    return peak


def _peak_of_step(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], is_module_alone: bool) -> int:
    args, kwargs = detached((args, kwargs))
    inputs = tensors_held((args, kwargs))
    targets = [t for t in (*module.parameters(), *inputs) if t.requires_grad]
    is_fake = any(isinstance(t, FakeTensor) for t in inputs)
    device = HOST if is_fake else device_of((*inputs, *targets))
    alive = [*module.parameters(), *module.buffers(), *inputs]
    shape = (0,) if is_module_alone else ()
    undone = untouched(module, inputs, draws="own" if is_module_alone else "put back")
    gathered = [module] if has_units(module) else []  # what its units gather is asked of the module
    with undone, measure_growth(device, include=[*alive, *gathered]) as growth:
        outputs = [t for t in tensors_in(module(*args, **kwargs)) if t.requires_grad]
        losses = [t for t in outputs if not t.dim()]  # every loop holds them, `mse_loss`'s in the memory of its input
        if outputs:
            run_backward(outputs, targets, torch.ones_like, is_sharded=has_units(module), loss_shape=shape)
        del losses
    return storage_bytes(alive) + growth.peak_bytes


def plain_step_peak(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    predicted_bytes: int,
    *,
    is_module_alone: bool = False,
) -> int | None:
    """Measured peak in bytes of a step of a module that is not rewritten; None where it does not fit on the device.

    What the forward's locals hold to its end, and which of its outputs a caller can see, no graph tells.

    Args:
        module: What is run.
        args: Positional arguments.
        kwargs: Keyword arguments.
        predicted_bytes: Its peak as predicted: where that does not fit, it is not run.
        is_module_alone: See `step_peak`.
    """
    alive = [*module.parameters(), *module.buffers(), *tensors_held((args, kwargs))]
    device = HOST if any(isinstance(t, FakeTensor) for t in alive) else device_of(alive)
    if predicted_bytes - storage_bytes(alive) > device_memory(device).free_bytes:
        return None
    try:
        return retried(lambda: step_peak(module, args, kwargs, is_module_alone=is_module_alone))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        empty_cache(device)
        logger.info("%s: the plain peak is predicted, its step does not fit", type(module).__name__)
        return None


def beside_operations(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    predicted_seconds: float,
    num_operations: int,
    *,
    draws: Draws = "put back",
) -> float:
    """Seconds of a step of a module that is not rewritten beyond those of its operations, by the fastest of a few.

    Calls of modules, and what lies between the regions of one, are no operation's. Long operations hide them, and on
    fake tensors nothing tells them.

    Args:
        module: What is run.
        args: Positional arguments.
        kwargs: Keyword arguments.
        predicted_seconds: Forward and backward of all operations.
        num_operations: How many these are.
        draws: See `untouched`.
    """
    tensors = *tensors_held((args, kwargs)), *module.parameters()
    is_fake = any(isinstance(t, FakeTensor) for t in tensors)
    if is_fake or predicted_seconds > SHORT_SECONDS * num_operations:
        return 0.0
    device = device_of(tensors)
    forward, backward, found = Stopwatch(device), Stopwatch(device), math.inf
    for _ in range(_TIMED_STEPS):
        own_args, own_kwargs = detached((args, kwargs))  # which a forward may take apart
        inputs = tensors_held((own_args, own_kwargs))
        with untouched(module, inputs, draws=draws):
            with forward:
                outputs = [t for t in tensors_in(module(*own_args, **own_kwargs)) if t.requires_grad]
            wanted = [t for t in (*module.parameters(), *inputs) if t.requires_grad]
            if not (outputs and wanted) or _refuses_grad(outputs):
                return 0.0
            with backward:  # without what `run_backward` hooks to each target
                torch.autograd.grad(outputs, wanted, [*map(torch.ones_like, outputs)], allow_unused=True)
            del outputs
        found = min(found, forward.seconds + backward.seconds)
    return max(0.0, found - predicted_seconds)


def infeasible_as_run(
    error: InfeasibleBudgetError, measured_bytes: int, budget_bytes: int, plain_peak_bytes: int
) -> InfeasibleBudgetError:
    """A planner's error, with what a step by its plan for the lowest peak was measured to need."""
    share = math.ceil(1000 * measured_bytes / plain_peak_bytes) / 10  # as a budget it is enough
    return InfeasibleBudgetError(
        f"the planner cannot go below {format_bytes(measured_bytes)}, which a step by its plan for the lowest peak was "
        f"measured to need ({share}% of the plain step's peak), and the budget is {format_bytes(budget_bytes)}; the "
        f"peak is set by {error.node!r}: raise memory_budget, lower the batch size or choose another planner",
        minimum_bytes=measured_bytes,
        budget_bytes=budget_bytes,
        node=error.node,
    )
