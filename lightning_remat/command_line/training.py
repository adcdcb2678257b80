"""What surrounds a model in training: optimizer, precision, the buckets of DDP, a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn, optim

from ..measure.tensor_bytes import logical_bytes
from ..module_state.nesting import tensors_in
from .usage_error import UsageError, one_line

Parameters = Iterable[nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Parameters], optim.Optimizer] | None] = {
    "adafactor": partial(optim.Adafactor, lr=1e-3),
    "adam": partial(optim.Adam, lr=1e-3),
    "adamw": partial(optim.AdamW, lr=1e-3),
    "none": None,
    "rmsprop": partial(optim.RMSprop, lr=1e-3),
    "sgd": partial(optim.SGD, lr=1e-3),
    "sgd-momentum": partial(optim.SGD, lr=1e-3, momentum=0.9),
}
"""Name → what makes it; only its state and its step count."""

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")

_TYPES = {"bf16": torch.bfloat16, "16": torch.float16}


def precision_context(precision: str) -> Callable[[], AbstractContextManager[Any]]:
    """The context in which the forward runs."""
    name, _, kind = precision.partition("-")
    return partial(torch.autocast, "cpu", dtype=_TYPES[name]) if kind == "mixed" else nullcontext


def true_type(precision: str) -> torch.dtype | None:
    """What parameters and inputs are converted to, where they are."""
    name, _, kind = precision.partition("-")
    return _TYPES.get(name) if kind == "true" else None


def make_optimizers(name: str | None, module: nn.Module) -> list[optim.Optimizer]:
    """The optimizers of that name; None stands for the module's own `configure_optimizers`, or for SGD.

    Raises:
        UsageError: The module's own cannot be made here.
    """
    configure = getattr(module, "configure_optimizers", None)
    if name is None and configure is not None:
        try:
            return _optimizers_in(configure())
        except Exception as error:
            raise UsageError(
                f"{type(module).__name__}.configure_optimizers() cannot run without a trainer: {one_line(error)}. "
                "Remedy: --optimizer adamw"
            ) from error
    make = OPTIMIZERS[name or "sgd"]
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [] if make is None or not parameters else [make(parameters)]


def _optimizers_in(configured: Any) -> list[optim.Optimizer]:
    """Of all the forms that Lightning takes."""
    if isinstance(configured, optim.Optimizer):
        return [configured]
    if isinstance(configured, Mapping):
        return _optimizers_in(cast(Mapping[str, Any], configured)["optimizer"])
    if isinstance(configured, (list, tuple)):
        entries = cast("list[Any] | tuple[Any, ...]", configured)
        return [o for entry in entries if not _is_scheduler(entry) for o in _optimizers_in(entry)]
    return []


def _is_scheduler(entry: Any) -> bool:
    return isinstance(entry, optim.lr_scheduler.LRScheduler) or (isinstance(entry, Mapping) and "scheduler" in entry)


def loss_of_output(output: Any) -> Tensor:
    """The loss that the model returned; else one whose gradient has a number for each that the model returned."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss
    losses = [(t * t.detach()).sum(dtype=torch.float32) for t in tensors_in(output) if t.requires_grad]
    if not losses:
        raise UsageError("the model's output depends on none of its parameters, so there is nothing to train")
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]


class WithBuckets(nn.Module):
    """A model beside the buckets in which DDP gathers its gradients: their bytes once more, throughout."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        num_bytes = logical_bytes(p for p in module.parameters() if p.requires_grad)
        self.register_buffer("buckets", torch.empty(num_bytes, dtype=torch.uint8))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module(*args, **kwargs)
