"""Operators that call functions, and kernels of Triton, run as they are, and what is around them by a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from least_budgets import least_budget
from torch import Tensor, nn
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.out_dtype import out_dtype
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention
from training_steps import assert_equal_traces, traces

from lightning_remat import find_batch_size, measure_peak, rematerialize

X = torch.randn(64, 8, 16)
BATCHES = [X, -X.abs(), X[:24], X]
"""By whose signs a condition holds or not."""


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Tanh())


class Around(nn.Module):
    """Blocks before and behind what is done with two activations."""

    def __init__(self, does: Callable[[Tensor, nn.Module, nn.Module], Tensor]) -> None:
        super().__init__()
        self.does, self.first, self.second = does, nn.Linear(16, 16), nn.Linear(16, 16)
        self.before, self.behind = (nn.Sequential(*(block() for _ in range(3))) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.does(self.before(x) - 0.5, self.first, self.second))


def condition(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: first(y).tanh(), lambda y: second(y).sigmoid(), (x,))


def loop(x: Tensor, first: nn.Module, _: nn.Module) -> Tensor:
    with torch.no_grad():
        until = torch.tensor(3)
        _, factor = while_loop(lambda i, v: i < until, lambda i, v: (i + 1, v * 0.5), (torch.tensor(0), x.detach()))
    return first(x) * factor


def steps(x: Tensor, first: nn.Module, _: nn.Module) -> Tensor:
    def one(carry: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        carry = (carry + y).tanh()
        return carry, carry.clone() * 2

    last, all_of_them = scan(one, torch.zeros(x.size(0), 16), first(x).transpose(0, 1).contiguous(), dim=0)
    return all_of_them.transpose(0, 1) + last[:, None]


def each(x: Tensor, first: nn.Module, _: nn.Module) -> Tensor:
    return mapped(lambda y: y.sin() * 2, first(x))


@torch.compiler.nested_compile_region
def region(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    return first(x).tanh() * second(x).sigmoid()


def attention(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    """On the CPU it has no backward."""
    with torch.no_grad():
        heads = x.detach().view(x.size(0), 8, 2, 8).transpose(1, 2)
        found = flex_attention(heads, heads, heads, score_mod=lambda score, b, h, i, j: score + 0.1 * (i - j))
    return first(x) * second(found.transpose(1, 2).reshape(x.shape))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("does", "where"),
    [
        (condition, "cond"),
        (loop, "while_loop"),
        (steps, "scan"),
        (each, "map.py"),
        (region, "invoke_subgraph.py"),
        (attention, "flex_attention"),
    ],
)
def test_what_is_around_is_planned_and_all_is_as_in_the_plain_module(does: Callable[..., Tensor], where: str) -> None:
    plain = Around(does)
    ours = copy.deepcopy(plain)
    plan = rematerialize(ours, X, memory_budget=least_budget(copy.deepcopy(plain), X))
    assert (plan.rung, bool(plan.num_recomputed)) == ("regions", True)
    assert "an operator calls functions: it runs as it is, between two graphs" in plan.reasons[0]
    assert where in plan.reasons[0]
    assert_equal_traces(traces(plain, BATCHES), traces(ours, BATCHES))


@pytest.mark.slow
def test_a_batch_size_is_found_for_it() -> None:
    module = Around(condition)
    found = find_batch_size(module, X[:2], lambda x: module(x).sum(), memory_budget="1MiB", max_batch_size=64)
    assert found.batch_size > 2


def sines(x: Tensor) -> Tensor:
    return (x.sin() * x.cos()).sum()


def test_what_is_made_within_a_function_is_counted() -> None:
    def peak(run: Callable[[], Tensor]) -> int:
        with measure_peak(include=[X]) as measured, torch.no_grad():
            run()
        return measured.peak_bytes

    peak(lambda: torch.cond(X.sum() > 1e9, torch.sum, sines, (X,)))  # it compiles the first time
    within = peak(lambda: torch.cond(X.sum() > 1e9, torch.sum, sines, (X,)))
    assert within == pytest.approx(peak(lambda: sines(X)), abs=256)
    assert within >= 4 * X.nbytes


def test_an_operator_that_takes_an_operation_is_metered() -> None:
    x = torch.ones(8, 8, dtype=torch.int8)
    with measure_peak() as measured:
        assert out_dtype(torch.ops.aten.mm.default, torch.int32, x, x).sum() == 8**3
    assert measured.peak_bytes >= 4 * 8**2


triton = pytest.importorskip("triton")


@triton.jit
def doubling(source: Any, target: Any) -> None:
    """What it does instead see `_launched`."""


def _launched(_: object, source: Tensor, target: Tensor, **__: Any) -> None:
    target.copy_(source.detach() * 2)


class Doubled(torch.autograd.Function):
    """As libraries of kernels have them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        made = torch.empty_like(x)
        doubling[(1,)](x, made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        made = torch.empty_like(gradient)
        doubling[(1,)](gradient, made)
        return made


def launches(x: Tensor, first: nn.Module, _: nn.Module) -> Tensor:
    made = torch.empty_like(x)
    doubling[(1,)](x, made)
    return first(x) * made


def launches_with_gradients(x: Tensor, first: nn.Module, _: nn.Module) -> Tensor:
    return Doubled.apply(first(x))


@pytest.mark.slow
@pytest.mark.parametrize("does", [launches, launches_with_gradients])
def test_a_kernel_of_triton_is_in_no_graph(does: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes, no version tells. Here nothing could launch it."""
    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda **_: True)
    monkeypatch.setattr(type(doubling), "run", _launched)
    plain = Around(does)
    ours = copy.deepcopy(plain)
    plan = rematerialize(ours, X, memory_budget=least_budget(copy.deepcopy(plain), X))
    assert (plan.rung, bool(plan.num_recomputed)) == ("regions", True)
    assert "a kernel of Triton is launched: it runs as it is, between two graphs" in plan.reasons[0]
    assert_equal_traces(traces(plain, BATCHES), traces(ours, BATCHES))
