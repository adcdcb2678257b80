"""Errors in the middle of a step: they come out as in the plain run, hold no memory, and the next step is right."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from rewriting import recomputing_copy
from torch import Tensor, nn
from training_steps import assert_equal_traces, step_peak, traces

from lightning_remat import is_recomputing
from lightning_remat.execution import executor

X = torch.randn(64, 6)


@torch.library.custom_op("lightning_remat_tests::fails", mutates_args=())
def fails(x: Tensor) -> Tensor:
    """An operation that runs out of memory when it is told to: in its first run or in a recomputation."""
    if Fails.when == ("recompute" if is_recomputing() else "forward"):
        raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
    return x.sigmoid()


@fails.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)
    Fails.last = weakref.ref(output)


def _derive(ctx: Any, gradient: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    if Fails.when == "backward":
        raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
    return gradient * y * (1 - y)


fails.register_autograd(_derive, setup_context=_save)


class Fails(nn.Module):
    when: str | None = None
    last: weakref.ref[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        return fails(x)


def network() -> nn.Sequential:
    block = [nn.Linear(6, 6), nn.Dropout(0.2), nn.BatchNorm1d(6)]
    return nn.Sequential(*copy.deepcopy(block), Fails(), *copy.deepcopy(block), nn.Linear(6, 6))


def failing(place: str, module: nn.Module) -> Any:
    """Makes the next step fail; returns what ends that."""
    if place == "hook":

        def hook(_gradient: Tensor) -> None:
            raise torch.OutOfMemoryError("out of memory in a hook (simulated)")

        return module[0].weight.register_hook(hook).remove
    Fails.when = place
    return lambda: setattr(Fails, "when", None)


def steps_alive() -> set[int]:
    return {id(o) for o in gc.get_objects() if type(o) is executor.Execution}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "recompute", "backward", "hook"])
def test_the_step_after_an_error_is_right_and_nothing_is_held(place: str) -> None:
    plain = network()
    ours = recomputing_copy(plain, X)
    before = step_peak(ours, X)
    ours.load_state_dict(plain.state_dict())
    gc.collect()
    others = steps_alive()
    gc.disable()
    try:
        end = failing(place, ours)
        with pytest.raises(torch.OutOfMemoryError, match="simulated"):
            ours(X).square().sum().backward()
        end()
        assert not is_recomputing()
        assert steps_alive() <= others, "memory is held"
        assert Fails.last is not None
        assert Fails.last() is None
    finally:
        gc.enable()
    ours.zero_grad()
    ours.load_state_dict(plain.state_dict())
    assert_equal_traces(traces(plain, [X, X + 1]), traces(ours, [X, X + 1]))
    assert step_peak(ours, X) == before


@pytest.mark.parametrize("place", ["recompute", "backward"])
def test_a_backward_can_be_tried_again_after_an_error(place: str) -> None:
    plain = network()
    ours = recomputing_copy(plain, X)
    results = []
    for module in (plain, ours):
        torch.manual_seed(3)
        loss = module(X).square().sum()
        if module is ours:
            end = failing(place, ours)
            with pytest.raises(torch.OutOfMemoryError):
                loss.backward(retain_graph=True)
            end()
            ours.zero_grad()
        loss.backward()
        results.append([p.grad for p in module.parameters()] + list(module.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
