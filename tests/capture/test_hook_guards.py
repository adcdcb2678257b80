"""Hooks that submodules get later fire, wherever they come from, though most guards on them are left out."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewriting import recomputing_copy
from torch import Tensor, nn
from torch._dynamo.guards import GuardBuilder
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)

from lightning_remat.capture.hook_guards import has_hooked_submodules

X = torch.randn(4, 8)


class Net(nn.Module):
    """Has a layer that is no submodule, and one that may be None."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), nn.Linear(8, 8))
        self.register_module("none", None)
        self.outside = [nn.Linear(8, 8)]

    def forward(self, x: Tensor) -> Tensor:
        return self.outside[0](torch.tanh(self.layers(torch.sin(x))))


def doubled(_module: nn.Module, _args: Any, output: Any) -> Any:
    return output * 2


def halved(_module: nn.Module, args: Any) -> Any:
    return tuple(x / 2 for x in args)


def of_a_submodule(net: Net) -> None:
    net.layers[1][0].register_forward_hook(doubled)


def of_a_container(net: Net) -> None:
    net.layers[1].register_forward_hook(doubled)


def before_its_call(net: Net) -> None:
    net.layers[1][0].register_forward_pre_hook(halved)


def before_it_came(net: Net) -> None:
    other = copy.deepcopy(net.layers[1])
    other.register_forward_hook(doubled)
    net.layers[1] = other


def in_another_dictionary(net: Net) -> None:
    net.layers[0]._forward_hooks = OrderedDict()
    net.layers[0].register_forward_hook(doubled)


def outside_the_tree(net: Net) -> None:
    net.outside[0].register_forward_hook(doubled)


def gradients(net: nn.Module) -> list[Tensor]:
    net.zero_grad()
    net(X).square().sum().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return 0 < len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.slow
@pytest.mark.parametrize(
    "register",
    [of_a_submodule, of_a_container, before_its_call, before_it_came, in_another_dictionary, outside_the_tree],
)
def test_later_hooks_fire(register: Callable[[Net], None]) -> None:
    plain = Net()
    ours = recomputing_copy(plain, X, kept=[])
    before = gradients(plain)
    assert equal(gradients(ours), before)
    register(plain)
    register(ours)
    after = gradients(plain)
    assert not equal(after, before)
    assert equal(gradients(ours), after)


@pytest.mark.slow
def test_they_come_and_go() -> None:
    plain = Net()
    ours = recomputing_copy(plain, X, kept=[])
    for _ in range(2):
        handles = [net.layers[1].register_forward_hook(doubled) for net in (plain, ours)]
        assert has_hooked_submodules(ours)
        assert equal(gradients(ours), gradients(plain))
        for handle in handles:
            handle.remove()
        assert not has_hooked_submodules(ours)
        assert equal(gradients(ours), gradients(plain))


def test_hooks_of_the_module_itself_run_outside_its_forward() -> None:
    net = Net()
    net.register_forward_hook(doubled)
    assert not has_hooked_submodules(net)


def test_a_child_may_know_its_parent() -> None:
    net = Net()
    net.layers[1].parent = net.layers
    assert not has_hooked_submodules(net)
    of_a_submodule(net)
    assert has_hooked_submodules(net)


def test_what_torch_jit_compiled_may_have_some() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and still in use
        assert has_hooked_submodules(nn.Sequential(torch.jit.trace(nn.Linear(8, 8), X)))


@pytest.mark.slow
def test_which_guards_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    guard_hooks = GuardBuilder.SEQUENCE_LENGTH  # by which those are guarded that are

    def noted(builder: Any, guard: Any) -> None:
        asked.append(guard.name)
        guard_hooks(builder, guard)

    monkeypatch.setattr(GuardBuilder, "SEQUENCE_LENGTH", noted)
    gradients(recomputing_copy(Net(), X, kept=[]))
    hooks = [name for name in asked if "hooks" in name]
    assert hooks
    assert all("outside" in name for name in hooks), "no walk over submodules sees those"
    asked.clear()
    hooked = Net()
    of_a_submodule(hooked)
    gradients(recomputing_copy(hooked, X, kept=[]))
    assert any("['layers']" in name and "hooks" in name for name in asked)


@pytest.mark.sampled
@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
@pytest.mark.slow
def test_hooks_of_all_modules_fire_and_are_gone(register: Callable[[Any], Any]) -> None:
    plain = Net()
    ours = recomputing_copy(plain, X, kept=[])
    change: Any = doubled if register is register_module_forward_hook else halved
    for _ in range(2):
        assert equal(gradients(ours), gradients(plain))
        handle = register(lambda m, *values: change(m, *values) if isinstance(m, nn.Linear) else None)
        try:
            found = gradients(ours), gradients(plain)
        finally:
            handle.remove()
        assert equal(*found)
    assert equal(gradients(ours), gradients(plain))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_backward_hooks_of_all_modules_fire() -> None:
    plain = Net()
    ours = recomputing_copy(plain, X, kept=[])
    handle = register_module_full_backward_hook(lambda m, given, _: tuple(g if g is None else 2 * g for g in given))
    try:
        with pytest.warns(UserWarning, match="without rematerialization"):
            found = gradients(ours)
        assert equal(found, gradients(plain))
    finally:
        handle.remove()
    assert equal(gradients(ours), gradients(plain))
