"""Recomputations that bring a tape or draw, within the stretch in which they run."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from rewriting import Between, recomputing_copy, rewrite
from test_stretches import Failing, unrecorded
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from training_steps import assert_equal_traces, step_peak, traces

from lightning_remat import profile, simulate, trace
from lightning_remat.execution.rewriter import programs_in
from lightning_remat.execution.stretches import Again, LetGo
from lightning_remat.lowering import lower_kept
from lightning_remat.module_state.random_state import generators_in_use
from lightning_remat.operations.leaves import ask_for_gradients, differentiable_in
from lightning_remat.operations.saved_tensors import tensors_of
from lightning_remat.schedules.schedule import Schedule


class Block(nn.Module):
    """Operations whose saved tensors are no outputs, between others."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.inner, self.dropout = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.inner(self.norm(x))))


def networks() -> tuple[nn.Module, nn.Module, Tensor]:
    """Plain, and one that keeps sums alone."""
    plain, x = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(8, 8)), torch.randn(2, 4, 8)
    graph = profile(trace(plain, x), x, repeats=1)
    ours = recomputing_copy(plain, x, kept=[n for n, node in enumerate(graph.nodes) if node.kind == "add"])
    return plain, ours, x


def assert_equal_steps(plain: nn.Module, ours: nn.Module, xs: list[Tensor]) -> None:
    torch.manual_seed(1)
    expected = traces(plain, xs)
    torch.manual_seed(1)
    assert_equal_traces(expected, traces(ours, xs))


@pytest.mark.slow
def test_they_do_not_divide_it() -> None:
    plain, ours, x = networks()
    (program,) = programs_in(ours)
    parts = [part for parts in program.before for part in parts]
    assert all(isinstance(part, Again | LetGo) for part in parts)
    stretches = [part for part in parts if isinstance(part, Again)]
    assert {program.traced.operations[n].kind for s in stretches for n in s.attended} == {"layer_norm", "dropout"}
    assert any(len(s.attended) == 2 for s in stretches)
    if torch.__version__ >= "2.14":  # until then a linear layer may ask
        assert unrecorded(program) == {"linear", "tanh"}, "what else runs needs no gradients"
    assert_equal_steps(plain, ours, [x, x, torch.randn(3, 4, 8), x])


def test_of_a_tuple_that_is_read_as_a_whole_only_what_asked_for_gradients_asks_for_them() -> None:
    value = torch.rand(3, requires_grad=True).max(0, keepdim=True)
    found = differentiable_in(7, (*value, [torch.zeros(2), value[0] * 2]))
    again = (torch.zeros(1), torch.zeros(1, dtype=torch.int64), [torch.zeros(2), torch.zeros(1)])
    for slot, leaf in found:
        assert slot == 7
        ask_for_gradients(again, leaf)
    assert [t.requires_grad for t in tensors_of([again])] == [True, False, False, True]
    assert differentiable_in(7, torch.zeros(2)) == []
    assert differentiable_in(7, torch.zeros(2, requires_grad=True)) == [(7, -1)]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["native_layer_norm.default", "bernoulli", "tanh.default"])
def test_one_that_fails_leaves_nothing(kernel: str) -> None:
    plain, ours, x = networks()
    ours(x).sum().backward()  # what is learned in a first step
    loss = ours(x).sum()
    state = torch.get_rng_state()
    with pytest.raises(MemoryError), Failing(kernel):
        loss.backward(retain_graph=True)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(generators_in_use.acquire, blocking=False).result()
        other.submit(generators_in_use.release).result()
    loss.backward()  # starts over
    for module in (plain, ours):
        module.zero_grad()
    assert_equal_steps(plain, ours, [x, x])


def test_a_tape_is_made_again_while_its_output_is_there() -> None:
    """The backward of a reader waits for the output."""
    module, x = nn.Sequential(*(nn.Sequential(nn.Dropout(0.5), nn.GELU()) for _ in range(4))), torch.randn(64, 64)
    module.insert(0, nn.Linear(64, 64))
    traced = trace(module, x)
    graph = profile(traced, x, repeats=1)
    last = len(graph.nodes) - 1
    is_dropout = [node.kind == "dropout" for node in graph.nodes]
    forward = [f"F{n} T{n}" if is_dropout[n] else f"F{n}" for n in range(last + 1)]
    backward = [
        f"B{n} D{n} T{n}" if is_dropout[n] else f"F{n - 1} B{n} D{n}" if n else "B0 D0" for n in range(last, -1, -1)
    ]
    backward[0] = f"D{last} F{last - 1} B{last}"  # nobody reads the last output
    schedule = Schedule.parse(" ".join([*forward, *backward]))
    ours = copy.deepcopy(module)
    rewrite(ours, schedule, x)
    (program,) = programs_in(ours)
    assert any(part.attended for parts in program.before for part in parts if isinstance(part, Again))
    assert_equal_steps(module, ours, [x, x])
    assert step_peak(ours, x) <= simulate(graph, schedule).peak_bytes


class Cubed(torch.autograd.Function):
    """Saves what is no output, and reads it twice: each time autograd asks for it."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        squared = x * x
        ctx.save_for_backward(squared)
        return squared * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = 3 * ctx.saved_tensors[0]
        total = total + 0 * ctx.saved_tensors[0]
        return gradient * total


def test_a_tape_is_read_twice() -> None:
    plain, x = Between(Cubed.apply), torch.randn(4, 6)
    ours = recomputing_copy(plain, x)
    assert_equal_steps(plain, ours, [x, x, x])


@pytest.mark.slow
def test_what_is_kept_stays_out() -> None:
    """A tape that stays is neither dropped nor caught again."""
    plain, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(2, 4, 8)
    traced = trace(plain, x)
    graph = profile(traced, x, repeats=1)
    kept = {n for n, node in enumerate(graph.nodes) if node.kind in ("add", "dropout", "layer_norm")}
    ours = copy.deepcopy(plain)
    rewrite(ours, lower_kept(graph, kept), x)
    (program,) = programs_in(ours)
    assert not any(part.attended for parts in program.before for part in parts if isinstance(part, Again))
    assert_equal_steps(plain, ours, [x, x])


class Half(nn.Module):
    """Divides by what is computed without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().mean(-1, keepdim=True) + 1
        return torch.sigmoid(x / scale)


def test_what_ran_without_gradients_runs_again_without() -> None:
    plain, x = Between(Half()), torch.randn(4, 6)
    assert_equal_steps(plain, recomputing_copy(plain, x), [x, x])


@pytest.mark.slow
def test_what_gradients_flow_to_may_change_while_it_trains() -> None:
    plain, ours, x = networks()
    for is_frozen, is_asked in [(False, False), (True, False), (True, True), (False, True), (False, False)]:
        x = x.detach().requires_grad_(is_asked)
        gradients: list[Tensor | None] = []
        for module in (plain, ours):
            module.get_submodule("0").requires_grad_(not is_frozen)
            x.grad = None
            torch.manual_seed(2)
            module(x).square().sum().backward()
            gradients.append(x.grad)
        assert (gradients[0] is None) == (not is_asked)
        assert gradients[0] is gradients[1] is None or torch.equal(*gradients)
        assert_equal_steps(plain, ours, [x, x])
