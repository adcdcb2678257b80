"""Code that computes otherwise where it is compiled is captured as it runs without a capture."""

from __future__ import annotations

import contextvars
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch._subclasses.fake_tensor import FakeTensorMode
from training_steps import assert_equal_traces, traces

from lightning_remat import rematerialize

X = torch.randn(256, 16)
PLACE = contextvars.ContextVar("place", default="")


def is_compiled() -> bool:
    import torch as t  # a helper with a variable of its own

    return t.compiler.is_compiling()


def is_traced(t: Tensor | None = None) -> bool:
    return is_compiled() or isinstance(t, str)


def is_recorded(t: Tensor) -> bool:
    try:
        return is_traced(t) or torch.xpu.is_current_stream_capturing()
    except Exception:  # of a PyTorch without such devices
        return False


def is_exported(size: int) -> bool:
    return size > 0 and torch.compiler.is_exporting()  # nothing at hand with which it might compute


class Scale(nn.Module):
    def __init__(self, asks: Any) -> None:
        super().__init__()
        self.layers, self.asks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), asks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = (layer(x) * (2.0 if self.asks(self, x) else 1.0)).sigmoid().tanh()
        return x


QUESTIONS: dict[str, Any] = {
    "is_compiling": lambda _self, _x: torch.compiler.is_compiling(),
    "is_dynamo_compiling": lambda _self, _x: torch.compiler.is_dynamo_compiling(),
    "is_exporting": lambda _self, _x: torch.compiler.is_exporting(),
    "a helper of sizes that asks whether it is exported": lambda _self, x: is_exported(x.shape[-1]),
    "a helper": lambda _self, _x: is_compiled(),
    "a helper that looks at a tensor": lambda _self, x: is_traced(x),
    "a helper that is given nothing": lambda _self, _x: is_traced(),
    "a helper that asks whether a stream is recorded": lambda _self, x: is_recorded(x),
}


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_who_computes_is_told_that_nothing_is_compiled(question: str) -> None:
    torch.manual_seed(0)
    module = Scale(QUESTIONS[question])
    plain, ours = copy.deepcopy(module), module
    plan = rematerialize(ours, X, memory_budget="80%", planner="periodic")
    assert plan.rung == "traced"
    assert plan.num_recomputed
    assert_equal_traces(traces(plain, [X, X]), traces(ours, [X, X]))


class Named(nn.Module):
    """Notes where it is, which cannot be captured, unless it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Sigmoid(), nn.Tanh()))
        )

    def forward(self, x: Tensor) -> Tensor:
        note("inside")
        return self.layers(x)


def note(place: str) -> None:
    if not torch.compiler.is_compiling():
        PLACE.set(place)


class Warns(nn.Sequential):
    """Looks at values only to warn, which cannot be captured, unless it is compiled."""

    def forward(self, x: Tensor) -> Tensor:
        self.warn_of_padding(x)
        return super().forward(x)

    def warn_of_padding(self, x: Tensor) -> None:
        if not is_traced(x) and (x[:, -1] == 0).all():
            warnings.warn("padding", stacklevel=1)


def warning() -> nn.Module:
    return Warns(*Named().layers)


@pytest.mark.parametrize("make", [Named, warning])
def test_who_only_avoids_what_cannot_be_captured_is_told_the_truth(make: Callable[[], nn.Module]) -> None:
    module = make()
    plain = copy.deepcopy(module)
    plan = rematerialize(module, X, memory_budget="80%", planner="periodic")
    assert plan.rung == "traced"
    assert plan.num_recomputed
    assert_equal_traces(traces(plain, [X, X]), traces(module, [X, X]))


class AsksForTypes(Scale):
    """As libraries do that may be scripted by TorchScript, MONAI's U-Nets among them."""

    def __init__(self) -> None:
        super().__init__(lambda *_: False)

    def forward(self, x: Any) -> Tensor:
        if torch.jit.isinstance(x, (str, Tensor)):
            pass
        elif torch.jit.isinstance(x, dict[str, Tensor]):
            x = x["x"] * 2
        elif torch.jit.isinstance(x, list[Tensor]):
            x = x[0] * 3
        elif torch.jit.isinstance(x, tuple[Tensor, int]):
            x = x[0] * x[1]
        if not torch.jit.isinstance(None, int | None):
            raise ValueError("None is optional")
        return super().forward(x)


@pytest.mark.slow
@pytest.mark.parametrize("forgets_rules", [False, True])
def test_types_that_may_be_scripted_are_asked_for_within_one_graph(forgets_rules: bool) -> None:
    if forgets_rules:
        trace_rules.clear_lru_cache()  # as `torch.distributed.destroy_process_group` does
    module = AsksForTypes()
    plain = copy.deepcopy(module)
    batches = [X, {"x": X}, [X], (X, 4), [X]]
    plan = rematerialize(module, X, memory_budget="80%", planner="periodic")
    assert plan.rung == "traced"
    assert plan.num_recomputed
    assert_equal_traces(traces(plain, batches), traces(module, batches))


class Masked(nn.Module):
    """Leaves out a mask of ones where it may look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scale(lambda *_: False), Scale(lambda *_: False)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, mask = batch
        x = self.first(x)
        if torch.compiler.is_compiling() or not mask.all():
            x = x * mask * 1.1
        return self.second(x)


@pytest.mark.slow
def test_values_decide_as_without_a_capture() -> None:
    torch.manual_seed(0)
    module = Masked()
    plain = copy.deepcopy(module)
    ones = torch.ones(256, 1)
    some = ones.clone()
    some[:5] = 0
    plan = rematerialize(module, (X, ones), memory_budget="90%", planner="periodic")
    assert plan.num_recomputed
    assert_equal_traces(traces(plain, [(X, ones), (X, some)]), traces(module, [(X, ones), (X, some)]))


@pytest.mark.slow
def test_on_fake_tensors_nobody_is_made_to_look_at_values() -> None:
    with FakeTensorMode():
        module = Masked()
        plan = rematerialize(
            module, (torch.randn(256, 16), torch.ones(256, 1)), memory_budget="90%", planner="periodic"
        )
    assert plan.rung == "traced"
    assert plan.num_recomputed


@pytest.mark.slow
def test_others_that_compile_are_told_the_truth() -> None:
    """While nothing is captured here, the answers are PyTorch's."""
    module = Scale(lambda *_: torch.compiler.is_compiling())
    compiled: Any = torch.compile(copy.deepcopy(module), backend="eager", fullgraph=True)
    rematerialize(module, X, memory_budget="80%", planner="periodic")
    assert not torch.equal(compiled(X), module(X))
