"""Whatever trial steps change is put back, on errors too."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lightning_remat.module_state.preserve as preserve_module
from lightning_remat.module_state.preserve import preserved, record


class Stateful(nn.Module):
    """State of every kind that a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("total", torch.zeros(2))
        self.calls = 0
        self.history: list[Any] = [1, [2]]
        self.by_name: dict[str, Any] = {"a": torch.ones(1)}
        self.recent: deque[int] = deque([1], maxlen=2)
        self.metric = torch.zeros(1)
        weight: Any = self.linear.weight  # as a quantized one has its scales
        weight.codes, weight.scales = torch.zeros(2), torch.zeros(2)

    def disturb(self) -> None:
        self.linear.weight.data.add_(1)
        self.linear.weight.grad = torch.ones(2, 2)
        self.linear.bias.requires_grad_(False)
        self.norm(torch.randn(4, 2))
        self.total = self.total + 1
        self.calls += 1
        self.history[1].append(3)
        self.history.append(4)
        self.by_name["b"] = 1
        self.by_name["a"] += 1
        self.recent.append(5)
        self.metric = self.metric + 1
        self.extra = 1
        weight: Any = self.linear.weight
        weight.codes, weight.is_new = None, False
        weight.scales.add_(1)
        self.eval()
        torch.rand(1), random.random(), np.random.random()  # noqa: NPY002

    def facts(self) -> list[Any]:
        grads = [p.grad for p in self.parameters()]
        flags = [p.requires_grad for p in self.parameters()]
        state = {k: v.tolist() for k, v in self.state_dict().items()}
        values = [self.calls, str(self.history), str(self.by_name), str(self.recent), self.metric.item(), self.training]
        beside = [str(vars(p)) for p in self.parameters()]
        return [grads, flags, state, values, beside, hasattr(self, "extra")]


def randoms() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]  # noqa: NPY002


@pytest.mark.parametrize("is_fake", [False, True])
def test_sizes_are_put_back(is_fake: bool) -> None:
    with FakeTensorMode() if is_fake else nullcontext():
        module = Stateful()
        sizes = [t.shape for t in module.state_dict().values()]
        total = module.total
        with preserved([module]):
            total.resize_(5)
            module.linear.weight.data = torch.zeros(3, 7)
        assert module.total is total
        assert [t.shape for t in module.state_dict().values()] == sizes
        assert is_fake or total.tolist() == [0, 0]


def test_mapped_files_are_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np.memmap, "copy", lambda _: pytest.fail("a copy of a file"))
    module = Stateful()
    module.samples = np.memmap(tmp_path / "samples", mode="w+", shape=(4,))
    with preserved([module]):
        module.disturb()


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(fails: bool) -> None:
    module = Stateful()
    buffer, history = module.total, module.history
    facts, states = module.facts(), randoms()
    try:
        with preserved([module]):
            module.disturb()
            assert module.facts() != facts
            assert randoms() != states
            if fails:
                raise KeyError("user's")
    except KeyError:
        assert fails
    assert module.facts() == facts
    assert randoms() == states
    assert module.total is buffer
    assert module.history is history


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_optimizer_state_is_put_back(kind: Any, steps_before: int) -> None:
    parameter = nn.Parameter(torch.ones(3))
    holder = nn.Module()
    holder.weight = parameter
    optimizer = kind([parameter], lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step() -> None:
        parameter.grad = torch.ones(3)
        optimizer.step()

    for _ in range(steps_before):
        step()
    before = str(optimizer.state_dict()), parameter.tolist(), sorted(vars(optimizer))
    with preserved([holder], [optimizer]):
        step()
        scheduler.step()
        assert str(optimizer.state_dict()) != before[0]
    assert (str(optimizer.state_dict()), parameter.tolist(), sorted(vars(optimizer))) == before
    assert all(p is parameter for p in optimizer.state)


ADVANCED = {
    "list": lambda: iter([1, 2, 3]),
    "tuple": lambda: iter((1, 2, 3)),
    "range": lambda: iter(range(1, 4)),
    "range of large numbers": lambda: iter(range(1, 2**70)),
    "count": lambda: itertools.count(1),
    "count in steps": lambda: itertools.count(1, 1.0),
    "count in fractions": lambda: itertools.count(Fraction(1)),
}


@pytest.mark.parametrize("make", ADVANCED.values(), ids=ADVANCED)
def test_iterators_are_where_they_were(make: Callable[[], Iterator[int]]) -> None:
    module: Any = nn.Sequential(nn.Identity())
    module[0].it = make()
    for first in (1, 2):
        with preserved([module]):
            assert [next(module[0].it), next(module[0].it)] == [first, first + 1]
        assert next(module[0].it) == first


class Held:
    """An object with an iterator."""

    def __init__(self, it: Any) -> None:
        self.it = it


@pytest.mark.parametrize("kind", [lambda it: it, lambda it: [it], lambda it: {"it": it}, Held])
def test_what_is_taken_from_other_iterators_is_given_once_more(kind: Any) -> None:
    module: Any = nn.Sequential(nn.Identity())
    module[0].held = kind(torch.rand(2) for _ in range(4))

    def taken(count: int) -> list[Tensor]:
        held = module[0].held
        it = held.it if isinstance(held, Held) else held["it"] if isinstance(held, dict) else held
        it = it[0] if isinstance(it, list) else it
        return [next(it).mul_(2) for _ in range(count)]

    torch.manual_seed(0)
    wanted = [2 * torch.rand(2) for _ in range(4)]
    state = torch.get_rng_state()
    torch.manual_seed(0)
    for count in (1, 3, 2):
        with preserved([module]):
            assert all(map(torch.equal, taken(count), wanted))
    assert all(map(torch.equal, taken(4), wanted))
    assert torch.equal(torch.get_rng_state(), state), "as many numbers are drawn as without"
    with pytest.raises(StopIteration):
        taken(1)


@pytest.mark.parametrize("make", [lambda: (k for k in range(4)), itertools.count, lambda: iter(range(4))])
def test_an_iterator_that_two_hold_is_one(make: Callable[[], Iterator[int]]) -> None:
    module: Any = nn.Sequential(nn.Identity())
    module.it = module[0].it = make()
    with preserved([module]):
        assert [next(module.it), next(module[0].it), next(module.it)] == [0, 1, 2]
    assert [next(module[0].it), next(module.it), next(module[0].it), next(module.it)] == [0, 1, 2, 3]


def test_an_iterator_of_which_nothing_was_taken_stays_itself() -> None:
    module: Any = nn.Identity()
    module.it = it = (k for k in range(3))
    with preserved([module]):
        assert module.it.gi_frame is it.gi_frame
    assert module.it is it


def test_an_iterator_that_a_step_makes_anew_is_the_old_one_again() -> None:
    module: Any = nn.Identity()
    module.it = (k for k in range(2))
    with preserved([module]):
        assert [*module.it] == [0, 1]
        module.it = (k for k in range(5, 9))
        assert next(module.it) == 5
    assert [*module.it] == [0, 1]


def test_text_and_shared_counters_are_as_they_were(tmp_path: Path) -> None:
    module: Any = nn.Identity()
    module.text, module.steps, module.file = (
        io.StringIO("one"),
        multiprocessing.Value("i", 3),
        (tmp_path / "f").open("w"),
    )
    module.text.seek(3)
    with preserved([module]):  # which says nothing of files
        module.text.write(" two")
        module.steps.value += 1
    module.file.close()
    assert (module.text.getvalue(), module.text.tell(), module.steps.value) == ("one", 3, 3)
    with preserved([module]):
        module.text.close()


@pytest.mark.parametrize("num_failing", [1, 2])
def test_all_else_is_put_back_where_something_fails(monkeypatch: pytest.MonkeyPatch, num_failing: int) -> None:
    done: list[int] = []

    def undo(k: int) -> None:
        done.append(k)
        if k in (1, 3)[:num_failing]:
            raise ArithmeticError(k)

    recorder = SimpleNamespace(undo=[partial(undo, k) for k in range(5)])
    monkeypatch.setattr(preserve_module, "Recorder", lambda *_: recorder)
    with pytest.raises(ArithmeticError if num_failing == 1 else ExceptionGroup) as raised:
        record([])()
    assert done == [4, 3, 2, 1, 0]
    if isinstance(raised.value, ExceptionGroup):
        assert [str(e) for e in raised.value.exceptions] == ["3", "1"]
