"""What others offer to train in less memory, each applied to a chain of stages; the chain's parameters stay its own."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint_sequential
from torchvision.models.densenet import _DenseLayer

from benchmarks.peer_networks import BLOCKS

Run = Callable[[Tensor], Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """A method of somebody else's.

    Attributes:
        name: With its setting.
        apply: From a chain and an input to what runs the chain; it may change the chain.
        is_compiled: Whether the tensors are made outside PyTorch's dispatcher, where our meter does not see them.
    """

    name: str
    apply: Callable[[nn.Sequential, Tensor], Run]
    is_compiled: bool = False


def peers(chain: nn.Sequential, backend: str | None) -> Iterator[Peer]:
    """The methods that have something to do on this chain.

    Args:
        chain: The network.
        backend: Of `torch.compile`; None leaves the compiler out.
    """
    for segments in range(2, max(2, math.isqrt(len(chain))) + 1):
        yield Peer(f"checkpoint_sequential, {segments} segments", _segmented(segments))
    if any(isinstance(stage, BLOCKS) for stage in chain):
        yield Peer("checkpoint_wrapper, every block", _wrapped)
    if any(isinstance(m, _DenseLayer) for m in chain.modules()):
        yield Peer("memory_efficient=True", _memory_efficient)
    if backend:
        yield from (Peer(f"torch.compile ({backend}), budget {b}", _compiled(backend, b), True) for b in (0.75, 0.5))


def _segmented(segments: int) -> Callable[[nn.Sequential, Tensor], Run]:
    return lambda chain, _: lambda x: checkpoint_sequential(chain, segments, x, use_reentrant=False)


def _wrapped(chain: nn.Sequential, _: Tensor) -> Run:
    apply_activation_checkpointing(chain, checkpoint_wrapper, check_fn=lambda module: isinstance(module, BLOCKS))
    return chain


def _memory_efficient(chain: nn.Sequential, _: Tensor) -> Run:
    for module in chain.modules():
        if isinstance(module, _DenseLayer):
            module.memory_efficient = True
    return chain


def _compiled(backend: str, budget: float) -> Callable[[nn.Sequential, Tensor], Run]:
    def apply(chain: nn.Sequential, x: Tensor) -> Run:
        torch.compiler.reset()
        run = torch.compile(chain, backend=backend)
        buffers = [b.clone() for b in chain.buffers()]
        with functorch.patch(activation_memory_budget=budget):
            run(x).square().mean().backward()  # compiles under this budget, the backward too
        chain.zero_grad()
        for buffer, value in zip(chain.buffers(), buffers, strict=True):
            buffer.copy_(value)
        return run

    return apply


def rockmate(chain: nn.Sequential, x: Tensor, budget_bytes: int) -> Run:
    """The chain under Rockmate's schedule for a budget of activations.

    Raises:
        ImportError: Rockmate, or a part of it, is not there.
    """
    return importlib.import_module("rockmate").Rockmate(chain, [x], budget=budget_bytes)
