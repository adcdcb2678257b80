"""Whatever trial steps change is put back, on errors too."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
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
        self.eval()
        torch.rand(1), random.random(), np.random.random()  # noqa: NPY002

    def facts(self) -> list[Any]:
        grads = [p.grad for p in self.parameters()]
        flags = [p.requires_grad for p in self.parameters()]
        state = {k: v.tolist() for k, v in self.state_dict().items()}
        values = [self.calls, str(self.history), str(self.by_name), str(self.recent), self.metric.item(), self.training]
        return [grads, flags, state, values, hasattr(self, "extra")]


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
    "count": lambda: itertools.count(1),
}


@pytest.mark.parametrize("make", ADVANCED.values(), ids=ADVANCED)
def test_iterators_are_where_they_were(make: Callable[[], Iterator[int]]) -> None:
    module: Any = nn.Sequential(nn.Identity())
    module[0].it = make()
    for first in (1, 2):
        with preserved([module]):
            assert [next(module[0].it), next(module[0].it)] == [first, first + 1]
        assert next(module[0].it) == first


def test_iterators_that_cannot_be_put_back_are_told() -> None:
    module: Any = nn.Sequential(nn.Identity())
    module[0].it = (k for k in range(3))
    with pytest.warns(UserWarning, match="Identity holds an iterator, it: .*Remedy"), preserved([module]):
        next(module[0].it)


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
