"""Whoever interrupts a profile, at whatever operation, finds module and torch as they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_remat import profile, trace


class Interrupt(TorchDispatchMode):
    """Presses Ctrl-C at an operation."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """TorchDynamo may bind calls inside."""
        return True

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # PyTorch cannot be interrupted where autograd asks a fake tensor for its device: it ends the process.
        self.left -= func is not torch.ops.prim.device.default
        if not self.left:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def state(module: nn.Module) -> list[Any]:
    tensors = [*module.state_dict().values(), torch.get_rng_state()]
    settings = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
    return [*(t.tolist() for t in tensors), *settings, [p.grad for p in module.parameters()]]


@pytest.mark.slow
def test_an_interrupted_profile_leaves_all_as_it_was() -> None:
    x = torch.randn(4, 3, 8, 8)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Conv2d(4, 2, 1)]
    module = nn.Sequential(*layers)
    module[1].register_forward_hook(lambda *_: None)
    traced = trace(module, x)
    before, held = state(module), [(dict(vars(m)), list(m._forward_hooks.values())) for m in module.modules()]
    at = 1
    while True:
        interrupt = Interrupt(at)
        try:
            with interrupt:
                profile(traced, x, repeats=1)
        except KeyboardInterrupt:
            pass
        assert state(module) == before
        assert [(dict(vars(m)), list(m._forward_hooks.values())) for m in module.modules()] == held
        if interrupt.left > 0:
            break
        at += 3
    assert at > 30, "nothing was interrupted"
    with pytest.raises(KeyboardInterrupt), Interrupt(5):
        profile(traced, x, repeats=1)
    assert profile(traced, x, repeats=1).nodes
