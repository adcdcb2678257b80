"""Backward hooks of submodules fire as they do in the plain step, and what they are tied to is planned."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from training_steps import assert_equal_traces, step_peak, traces

from benchmarks.peaks import LOSS_BYTES
from lightning_remat import InfeasibleBudgetError, rematerialize, restore
from lightning_remat.capture import dynamo
from lightning_remat.capture.tracer import trace
from lightning_remat.profiling.profiler import profile

X = torch.randn(64, 16)
Registers = Callable[[nn.Module, list[Any]], None]


def layers() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(16, 16), nn.GELU(), nn.Sigmoid())))


class Nested(nn.Module):
    """Loops over blocks, which TorchDynamo cannot interrupt."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layers()[:6] for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def noted(seen: list[Any], name: str, *gradients: Any) -> None:
    seen.append((name, *(t.sum().cpu() for g in gradients for t in g if t is not None)))  # holds next to nothing


def scales(module: nn.Module, seen: list[Any]) -> None:
    def hook(_module: nn.Module, inputs: Any, outputs: Any) -> Any:
        noted(seen, "full", inputs, outputs)
        return tuple(None if g is None else g * 1.5 for g in inputs)

    module.register_full_backward_hook(hook)


def scales_before(module: nn.Module, seen: list[Any]) -> None:
    def hook(_module: nn.Module, outputs: Any) -> Any:
        noted(seen, "pre", outputs)
        return tuple(g * 1.5 for g in outputs)

    module.register_full_backward_pre_hook(hook)


def both_twice(module: nn.Module, seen: list[Any]) -> None:
    for register in (scales, scales_before, scales, scales_before):
        register(module, seen)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], Registers]] = {
    "backward hook of a layer": (layers, ("6",), scales),
    "pre-hook of a layer": (layers, ("6",), scales_before),
    "several hooks of a layer": (layers, ("6",), both_twice),
    "of an activation": (layers, ("7",), both_twice),
    "of the layer that gets the input": (layers, ("0",), scales_before),
    "of all layers": (layers, tuple(map(str, range(1, 15))), both_twice),
    "within a block": (Nested, ("blocks.1.3",), both_twice),
    "of a block and within": (Nested, ("blocks.1", "blocks.1.3"), both_twice),
}


def steps(module: nn.Module, seen: list[Any], *, has_input_gradient: bool = True) -> list[Any]:
    """All that two steps compute, and what the hooks saw of it."""
    found: list[Any] = []
    seen.clear()
    for k in range(2):
        module.zero_grad()
        x = (X + k).requires_grad_(has_input_gradient)
        y = module(x)
        y.square().sum().backward()
        found += [("step", y.detach(), *(p.grad for p in (*module.parameters(), x) if p.grad is not None))]
    return found + seen


def assert_same(ours: list[Any], plain: list[Any]) -> None:
    assert [kind for kind, *_ in ours] == [kind for kind, *_ in plain]
    for (_, *a), (_, *b) in zip(ours, plain, strict=True):
        assert len(a) == len(b)
        assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_hooks_fire_as_in_the_plain_step_within_the_budget(case: str) -> None:
    torch.manual_seed(0)
    make, names, register = CASES[case]
    module, seen = make(), list[Any]()
    for name in names:
        register(module.get_submodule(name), seen)
    plain, plain_peak = steps(module, seen), step_peak(module, X) - LOSS_BYTES
    with pytest.raises(InfeasibleBudgetError) as caught:
        rematerialize(module, X, memory_budget=1, planner="periodic")
    for budget in (int(caught.value.minimum_bytes), int(0.8 * plain_peak)):
        plan = rematerialize(module, X, memory_budget=budget, planner="periodic")
        assert plan.rung == "traced"
        assert plan.num_recomputed
        assert plan.plain.peak_bytes == pytest.approx(plain_peak, rel=0.01)
        assert_same(steps(module, seen), plain)
        measured = step_peak(module, X) - LOSS_BYTES
        assert measured == pytest.approx(plan.peak_bytes, rel=0.01)
        assert measured <= budget
    restore(module)
    assert_same(steps(module, seen), plain)


@pytest.mark.slow
@pytest.mark.parametrize("register", [scales_before, lambda m, seen: m.register_full_backward_hook(lambda *_: None)])
def test_pytorch_warns_as_in_the_plain_step(register: Registers) -> None:
    """Of a hook without gradients of inputs; a pre-hook needs none."""
    module, seen = layers(), list[Any]()
    register(module[0], seen)
    counts: list[int] = []
    for rewrites in (False, True):
        if rewrites:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rematerialize(module, X, memory_budget="80%", planner="periodic")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            steps(module, seen, has_input_gradient=False)
        counts.append(len(told))
    assert counts[0] == counts[1]


def test_a_profile_fires_no_hook() -> None:
    module, seen = layers(), list[Any]()
    both_twice(module[6], seen)
    traced = trace(module, X)
    profile(traced, X, repeats=1)
    assert not seen
    assert "backward_hooks" in str(traced.fx_graph)


@pytest.mark.slow
def test_hooks_that_come_later_and_go() -> None:
    module, seen = layers(), list[Any]()
    both_twice(module[3], seen)
    rematerialize(module, X, memory_budget="80%", planner="periodic")
    twin = copy.deepcopy(module)
    restore(twin)
    late = [m[3].register_full_backward_hook(lambda _m, g, _o: (g[0] * 2,)) for m in (module, twin)]
    assert_same(steps(module, seen), steps(twin, seen))
    for handle in late:
        handle.remove()
    assert_same(steps(module, seen), steps(twin, seen))
    late = [m[6].register_full_backward_hook(lambda _m, g, _o: (g[0] * 2,)) for m in (module, twin)]
    assert_same(steps(module, seen), steps(twin, seen))


@pytest.mark.slow
def test_hooks_of_all_modules_that_are_others_in_each_step_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_MOST_GRAPHS", 3)
    module, calls = layers(), list[Any]()
    rematerialize(module, X, memory_budget="80%", planner="periodic")

    def step() -> None:
        handle = register_module_forward_hook(lambda *_: calls.append(None))  # pyright: ignore
        with handle:
            module(X).sum().backward()

    for _ in range(2):
        step()
    with pytest.warns(UserWarning, match="hooks of all modules have been others 3 times"):
        step()
    assert "forward" not in vars(module)
    assert len(calls) == 3 * len([*module.modules()])


class Steeper(nn.Tanh):
    pass


@pytest.mark.slow
def test_methods_that_are_others_in_each_step_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_MOST_GRAPHS", 3)
    module = nn.Sequential(*layers(), Steeper())
    rematerialize(module, X, memory_budget="80%", planner="periodic")
    for k in range(1, 4):
        monkeypatch.setattr(Steeper, "forward", lambda self, x, k=k: torch.tanh(k * x), raising=False)
        with nullcontext() if k < 3 else pytest.warns(UserWarning, match="methods of classes have been others 3 times"):
            made = module(X)
        assert torch.equal(made, torch.tanh(k * module[:-1](X)))
    assert "forward" not in vars(module)


class HooksTensor(nn.Module):
    """Registers a hook on a tensor beside the hooks of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(), layers()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h.register_hook(lambda g: g * 3)
        return self.second(h)


@pytest.mark.slow
def test_a_hook_of_a_tensor_beside_them_is_not_lost() -> None:
    torch.manual_seed(0)
    module, seen = HooksTensor(), list[Any]()
    both_twice(module.second[3], seen)
    plain = steps(module, seen)
    plan = rematerialize(module, X, memory_budget="80%", planner="periodic")
    assert plan.num_recomputed
    assert_same(steps(module, seen), plain)


class Clamped(nn.Module):
    """Hooks what it has computed, before which something may be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.up(self.norm(x)))
        h.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        return x + self.down(h)


@pytest.mark.slow
def test_hooks_of_tensors_stand_beside_those_that_tell_of_backwards() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Clamped() for _ in range(4)))
    ours = copy.deepcopy(plain)
    assert rematerialize(ours, X, memory_budget="60%").num_recomputed
    batches = [X, X * 2, X]
    assert_equal_traces(traces(plain, batches), traces(ours, batches))
