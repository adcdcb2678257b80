"""Errors in the middle of a step: they come out as in the plain run, hold no memory, and the next step is right."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from random_modules import Scaled
from rewriting import recomputing_copy
from torch import Tensor, nn
from training_steps import assert_equal_traces, step_peak, traces
from uses import same

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


class Saves(Scaled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round() + x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (2 + ctx.saved_tensors[0].sin())


class Applies(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function.apply(self.first(x).tanh()).sigmoid())


@pytest.mark.parametrize("function", [Scaled, Saves])
def test_what_is_not_captured_of_a_function_is_refused(function: type[torch.autograd.Function]) -> None:
    """The gradient of its backward: TorchDynamo captures backwards as if nobody differentiated them."""
    module, x = Applies(function), torch.randn(3, 4)
    ours = recomputing_copy(module, x)
    assert_equal_traces(traces(module, [x, x]), traces(ours, [x, x]))
    with pytest.raises(RuntimeError, match="leave the module that applies it out"):  # noqa: PT012 - either may
        (gradient,) = torch.autograd.grad(ours(x).sum(), ours.first.weight, create_graph=True)
        gradient.sum().backward()
    assert_equal_traces(traces(module, [x, x]), traces(ours, [x, x]))


class StraightThrough(Scaled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_what_a_function_hands_on_is_differentiated() -> None:
    module, x = Applies(StraightThrough), torch.randn(3, 4)
    ours = recomputing_copy(module, x)
    for _ in range(2):
        for m in (module, ours):
            m.zero_grad()
            (gradient,) = torch.autograd.grad(m(x).sum(), m.first.weight, create_graph=True)
            gradient.square().sum().backward()
        assert module.first.weight.grad is not None
        assert same(*([p.grad for p in m.parameters()] for m in (module, ours)))
