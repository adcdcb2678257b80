"""Which submodules are found to rewrite, and that looking through a step keeps nothing."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from diary import Diary
from torch import Tensor, nn

from lightning_remat.regions.calls import Call
from lightning_remat.regions.look_through import look_through
from lightning_remat.regions.step_run import untouched


def find_calls(root: nn.Module, step: Callable[[], object], modules: Sequence[Any] | None = None) -> list[Call]:
    return look_through(root, step, modules).calls


class Root(nn.Module):
    """Calls its parts as the test says."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.loss = nn.CrossEntropyLoss()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


X, Y = torch.randn(3, 4), torch.tensor([0, 1, 0])


@pytest.mark.parametrize(
    ("step", "names"),
    [
        (lambda r: r.net(X), ["net"]),
        (lambda r: r.loss(r.head(r.net(X)), Y), ["net", "head"]),
        (lambda r: r.net(r.frozen(X)), ["net"]),
        (lambda r: (r.net(X), r.net(X)), ["net", "net"]),
        (lambda r: r(X), ["net"]),  # the root's own forward only hands on
        (lambda r: r.loss(r(X), Y), ["net"]),
    ],
    ids=["one", "two", "frozen", "twice", "handed-on", "with-loss"],
)
def test_outermost_trainable_calls(step: Any, names: list[str]) -> None:
    root = Root(step)
    calls = find_calls(root, lambda: root.step(root))
    assert [c.name for c in calls] == names
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in root.modules())  # pyright: ignore


def test_a_forward_that_does_more_is_a_region_itself() -> None:
    class Doubled(Root):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.net(x)

    root = Doubled(None)
    (call,) = find_calls(root, lambda: root(X))
    assert call.name == ""
    assert call.module is root


def test_arguments_are_those_of_the_call_without_their_history() -> None:
    root = Root(None)
    net, head = find_calls(root, lambda: root.head(input=root.net(X)))
    assert torch.equal(net.args[0], X)
    assert not net.args[0].requires_grad
    inner = head.kwargs["input"]
    assert inner.requires_grad
    assert inner.grad_fn is None


def test_modules_are_taken_by_name_or_object() -> None:
    root = Root(None)
    (call,) = find_calls(root, lambda: root(X), ["net.2"])
    assert call.name == "net.2"
    (call,) = find_calls(root, lambda: root(X), [root.net])
    assert call.name == "net"


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["nett"], "modules names 'nett', which is no submodule of Root"),
        (["net", "net.0"], "lies inside it: name one"),
        (["head"], r"calls none of modules=\['head'\]"),
    ],
)
def test_wrong_modules(modules: list[str], message: str) -> None:
    root = Root(None)
    with pytest.raises(ValueError, match=message):
        find_calls(root, lambda: root(X), modules)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is (deprecated|not supported)")
def test_what_torch_jit_has_compiled_is_looked_past() -> None:
    """As a teacher that is loaded beside the network that learns."""
    root = Root(None)
    root.teacher = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    (call,) = find_calls(root, lambda: root(X) + root.teacher(X).sum())
    assert call.name == "net"
    with pytest.raises(ValueError, match=r"'teacher'.*is a ScriptModule. Remedy: rematerialize the module before"):
        find_calls(root, lambda: root(X), ["teacher"])


def test_nothing_to_train() -> None:
    root = Root(None)
    with pytest.raises(ValueError, match=r"no submodule with parameters.*modules="):
        find_calls(root, lambda: root.frozen(X))


def test_activations_die_while_a_step_is_looked_through() -> None:
    alive: list[int] = []
    outputs: list[weakref.ref[Tensor]] = []

    class Layer(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            alive.append(sum(r() is not None for r in outputs))
            out = super().forward(input).relu()
            outputs.append(weakref.ref(out))
            return out

    root = nn.Sequential(*(Layer(4, 4) for _ in range(6)))
    find_calls(root, lambda: root(X))
    assert max(alive) == 1  # the input of the layer that runs


def test_a_tensor_that_comes_in_twice_is_one_tensor_in_the_call_that_is_planned() -> None:
    """As labels and tokens of a language model often are: TorchDynamo guards on it."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, *, other: Tensor) -> Tensor:
            return self.linear(x) + other

    root, x = nn.ModuleDict({"adds": Adds()}), torch.randn(3, 4)
    (call,) = look_through(root, lambda: root["adds"](x, other=x)).calls
    assert call.args[0] is call.kwargs["other"]
    assert call.args[0] is not x


TOLD = Diary[tuple[Any, ...]]()


class Penalized(nn.Module):
    """Differentiates within its forward, after it has counted, drawn and normalized; tells what it found."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found = (self.calls, torch.rand(1).item(), random.random(), self.net[1].num_batches_tracked.item())
        x = x.detach().requires_grad_()
        out = self.net(x)
        TOLD.add((*found, self.net[1].running_mean.sum().item()))
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return out.sum() + slope.square().sum()


def test_a_step_that_differentiates_is_looked_through_twice_from_the_same_state() -> None:
    module, x = Penalized(), torch.randn(4, 6)
    TOLD.read()
    before = [t.clone() for t in module.state_dict().values()]
    torch.manual_seed(0)
    view = look_through(module, lambda: module(x), ["net"], undone=lambda: untouched(module, x))
    assert view.differentiates
    assert [call.name for call in view.calls] == ["net"]
    first, second = TOLD.read()
    assert first == second == (1, *first[1:3], 0, first[4])
    assert module.calls == 0
    assert all(torch.equal(a, b) for a, b in zip(before, module.state_dict().values(), strict=True))


def test_a_step_that_is_known_to_differentiate_runs_once_and_another_may_run_in_its_place() -> None:
    module, x = Penalized(), torch.randn(4, 6)
    ran: list[str] = []

    def step() -> None:
        ran.append("step")
        raise LookupError

    def differentiating() -> Tensor:
        ran.append("differentiating")
        return module(x)

    def look(**how: Any) -> list[str]:
        ran.clear()
        look_through(module, step, ["net"], differentiating=differentiating, **how)
        return list(ran)

    assert look(again_after=(LookupError,)) == ["step", "differentiating"]
    assert look(is_known_to_differentiate=True) == ["differentiating"]
    with pytest.raises(LookupError):
        look()
