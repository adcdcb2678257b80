"""The training step that is asked about: model, batch, loss and optimizer on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from ..batch_search.plain_trial import PlainTrial
from ..batch_search.resizing import has_batch_dimension
from ..measure.tensor_bytes import logical_bytes
from .request import Request
from .sharding import shard_blocks
from .target import exchanged, make_module
from .training import WithBuckets, loss_of_output, make_optimizers, precision_context, true_type
from .usage_error import UsageError, one_line

_PROFILED_SIZE = 32
"""Samples of the larger of two profiles where the batch size is asked for."""


@dataclass(frozen=True, slots=True)
class Network:
    """A training step to plan.

    Attributes:
        name: Of the model's class.
        module: The model alone.
        trial: Its step.
        buffer_bytes: Its buffers.
        parameter_bytes: Its parameters.
        optimizers: Names of the optimizers' classes.
        inputs: The batch in words.
        is_sharded: Whether the model is under `fully_shard`.
        units: Class → how many of its modules are so by themselves.
    """

    name: str
    module: nn.Module
    trial: PlainTrial
    parameter_bytes: int
    buffer_bytes: int
    optimizers: tuple[str, ...]
    inputs: tuple[str, ...]
    is_sharded: bool = False
    units: Mapping[str, int] = field(default_factory=dict[str, int])


def make_network(request: Request, mode: FakeTensorMode, mesh: DeviceMesh | None) -> Network:
    """The step that the request asks about; its forward has run once. Over a mesh the model is sharded block by block.

    Raises:
        UsageError: The model cannot be made, or does not take these inputs.
    """
    module = make_module(request.target, mode)
    with mode:
        if (kind := true_type(request.precision)) is not None:
            module = exchanged(module, lambda t: t.to(kind) if t.is_floating_point() else t)
        batch = _batch(request, module, kind or torch.float32, mode)
        if not has_batch_dimension(batch):
            raise UsageError("no input has a batch dimension: give --input 8x…")
        name, parameter_bytes = type(module).__name__, logical_bytes(module.parameters())
        units: Mapping[str, int] = {} if mesh is None else shard_blocks(module, mesh)
        optimizers = make_optimizers(request.optimizer, module)
        is_ddp = request.strategy == "ddp" and request.world_size > 1
        whole = WithBuckets(module) if is_ddp else module
        precision = precision_context(request.precision)
        _try_forward(whole, batch, precision)
    return Network(
        name=name,
        module=module,
        trial=PlainTrial(
            whole,
            batch,
            lambda data: loss_of_output(_called(whole, data)),
            optimizers,
            precision,
            torch.autograd.backward,
            [module] if is_ddp else None,
            is_accumulating=False,
            gather_bandwidth=request.gather_bandwidth,
        ),
        parameter_bytes=parameter_bytes,
        buffer_bytes=logical_bytes(module.buffers()),
        optimizers=tuple(type(optimizer).__name__ for optimizer in optimizers),
        inputs=tuple(_described(batch)),
        is_sharded=mesh is not None,
        units=units,
    )


def _batch(request: Request, module: nn.Module, kind: torch.dtype, mode: FakeTensorMode) -> Any:
    """Positional inputs as a list, keyword inputs as a mapping."""
    if not request.inputs:
        return _own_example(module, kind, mode)
    name = getattr(module, "main_input_name", None)
    is_tokens = name == "input_ids"
    tensors = [shape.tensor(_PROFILED_SIZE, torch.int64 if is_tokens else kind) for shape in request.inputs]
    if not isinstance(name, str):
        return tensors
    batch = {name: tensors[0]}  # Hugging Face
    if is_tokens and type(module).__name__.endswith(("LMHeadModel", "ForCausalLM", "ForMaskedLM")):
        batch["labels"] = tensors[0].clone()
    return batch


def _own_example(module: nn.Module, kind: torch.dtype, mode: FakeTensorMode) -> Any:
    """The `example_input_array` of a LightningModule."""
    example = getattr(module, "example_input_array", None)
    if example is None:
        raise UsageError(f"{type(module).__name__} has no example_input_array: give --input, such as 32x3x224x224")

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        made = leaf if isinstance(leaf, FakeTensor) else mode.from_tensor(leaf)
        return made.to(kind) if made.is_floating_point() else made

    example = tree_map(fake, example)
    return [example] if isinstance(example, Tensor) else example


def _called(module: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return module(**cast(Mapping[str, Any], batch))
    return module(*cast("list[Any]", batch))


def _try_forward(module: nn.Module, batch: Any, precision: Callable[[], AbstractContextManager[Any]]) -> None:
    """Runs the forward once, so that what the model does not take is told in one line."""
    try:
        with precision(), torch.no_grad():
            _called(module, batch)
    except Exception as error:
        shapes, text = " and ".join(_described(batch)), one_line(error)
        inner = module.module if isinstance(module, WithBuckets) else module
        hint = ". Tokens are asked for by :int64, as in --input 8x128:int64" if "ndices" in text else ""
        raise UsageError(f"{type(inner).__name__} does not take {shapes}: {text}{hint}") from error


def _described(batch: Any) -> list[str]:
    leaves = list(cast(Mapping[str, Any], batch).values()) if isinstance(batch, Mapping) else cast("list[Any]", batch)
    return [
        f"{'×'.join(map(str, t.shape))} {str(t.dtype).removeprefix('torch.')}" for t in leaves if isinstance(t, Tensor)
    ]
