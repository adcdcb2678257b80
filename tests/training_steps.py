"""Training steps whose every trace is compared bitwise, and whose memory is metered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks.peaks import take_step
from lightning_remat import measure_peak
from lightning_remat.regions.self_check import fingerprint


def output_tensors(outputs: Any) -> list[Tensor]:
    """The tensors in outputs with gradients."""
    return [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]


def step_peak(module: nn.Module, *inputs: Tensor, device: torch.device | None = None) -> int:
    """Metered peak of one forward and backward, parameter gradients fresh."""
    module.zero_grad(set_to_none=True)
    with measure_peak(device, [module, *inputs]) as measured:
        take_step(module, *inputs)
    return measured.peak_bytes


def loss_of(outputs: Any) -> Tensor:
    """A loss that depends on every output."""
    return torch.stack([(t * t).mean() + t.sum() for t in output_tensors(outputs)]).sum()


def traces(
    module: nn.Module, batches: Sequence[Any], *, step: Callable[[nn.Module, Any], Tensor] | None = None
) -> dict[str, Tensor]:
    """Losses, parameter gradients, buffers and random state of some training steps with SGD."""
    torch.manual_seed(7)
    found: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    for k, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(module(batch)) if step is None else step(module, batch)
        if step is None:
            loss.backward()
        found[f"{k} loss"] = loss.detach()
        found |= {f"{k} grad {n}": p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        found |= {f"{k} buffer {n}": b.clone() for n, b in module.named_buffers()}
        found[f"{k} random"] = torch.get_rng_state()
        optimizer.step()
    return found


def assert_equal_traces(plain: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
    """Bitwise equality of all traces."""
    assert plain.keys() == ours.keys()
    different = [k for k in plain if fingerprint(plain[k]) != fingerprint(ours[k])]
    assert not different, different[:5]
