"""What users have compiled runs as compiled: here by a compiler whose code computes something else than its source."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from training_steps import assert_equal_traces, traces

from lightning_remat import TraceError, rematerialize

X = torch.randn(32, 16)


def other_bits(module: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
    """As fused kernels have."""
    return lambda *inputs: tuple(output * 1.001 for output in module(*inputs))


@torch.compile(backend=other_bits)
def activation(x: Tensor) -> Tensor:
    return x * x.sigmoid()


class Block(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor] = nn.functional.gelu) -> None:
        super().__init__()
        self.function = function
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.function(self.up(self.norm(x))))


class CallsCompiled(Block):
    """Calls a function that is compiled, of the file's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(activation(x))


class CompiledForward(Block):
    """Is compiled itself."""

    @torch.compile(backend=other_bits)
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).sigmoid())


class CompiledMethod(Block):
    """Calls a method that is."""

    @torch.compile(backend=other_bits)
    def halved(self, x: Tensor) -> Tensor:
        return x / 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.halved(x))


@pytest.mark.slow
@pytest.mark.parametrize("between", [lambda: Block(activation), CallsCompiled, CompiledForward, CompiledMethod])
def test_steps_are_those_of_the_compiled_function(between: Callable[[], nn.Module]) -> None:
    plain = nn.Sequential(Block(), Block(), between(), Block(), Block())
    ours = copy.deepcopy(plain)
    assert rematerialize(ours, X, memory_budget="90%").num_recomputed
    batches = [X, X * 2, X]
    assert_equal_traces(traces(plain, batches), traces(ours, batches))


class Augmentation:
    """Has compiled methods, and is no module."""

    @torch.compile(backend=other_bits)
    def halved(self, x: Tensor) -> Tensor:
        return x / 2

    @torch.compile(backend=other_bits)
    def __call__(self, x: Tensor) -> Tensor:
        return x.sin()


AUGMENTATION = Augmentation()


class CallsAMethod(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(AUGMENTATION.halved(x))


class CallsAnObject(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(AUGMENTATION(x))


@pytest.mark.slow
@pytest.mark.parametrize("between", [CallsAMethod, CallsAnObject])
def test_steps_are_those_of_the_compiled_methods_of_an_object(between: Callable[[], nn.Module]) -> None:
    plain = nn.Sequential(Block(), Block(), between(), Block(), Block())
    ours = copy.deepcopy(plain)
    assert rematerialize(ours, X, memory_budget="90%").num_recomputed
    batches = [X, X * 2, X]
    assert_equal_traces(traces(plain, batches), traces(ours, batches))


def test_of_a_module_that_is_compiled_itself_it_is_said() -> None:
    with pytest.raises(TraceError, match="CompiledForward holds a compiled part"):
        rematerialize(CompiledForward(), X, memory_budget="80%")


class Breaks(nn.Module):
    """Looks at values, so that it is captured in pieces, and at later steps as others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(*_layers(), nn.Linear(8, 8)) for _ in range(2))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x)
        return self.second(x * (x.detach().mean().item() if self.calls % 2 else self.calls))


def _layers() -> list[nn.Module]:
    return [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Sigmoid(), nn.Tanh())]


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["compiled_autograd", "caching_precompile", "use_graph_deduplication"])
def test_what_users_set_for_their_compiled_code_is_not_for_ours(setting: str) -> None:
    """With the former two, what is profiled in a step ran code that was captured, for which this step waited."""
    module, x = Breaks(), torch.randn(64, 8)
    plain = copy.deepcopy(module)
    with torch._dynamo.config.patch({setting: True}):
        assert rematerialize(module, x, memory_budget="85%", planner="periodic").num_recomputed
        assert_equal_traces(traces(plain, [x, x, x[:7]]), traces(module, [x, x, x[:7]]))
