"""What a module changes without holding it, by functions, classes and globals, is put back as what it holds is."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lightning_remat
from lightning_remat import rematerialize
from lightning_remat.errors import InfeasibleBudgetError
from lightning_remat.module_state.own_code import is_own_file
from lightning_remat.module_state.preserve import preserved

BANK: list[Tensor] = []
CALLS = 0


class Counting(nn.Module):
    """Tells how often it was called, counted where a case says."""

    def __init__(self, count: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.count = count
        self.net = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Sigmoid())))

    def number(self) -> float:
        return float(self.count())  # pyright: ignore[reportOptionalCall]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.number()


def rebound() -> Counting:
    total = 0

    def count() -> int:
        nonlocal total
        total += 1
        return total

    return Counting(count)


def appended() -> Counting:
    seen: list[int] = []
    return Counting(lambda: (seen.append(1), len(seen))[1])


class Tally:
    total = 0

    def up(self) -> int:
        self.total += 1
        return self.total


def of_a_method() -> Counting:
    return Counting(Tally().up)


def of_a_builtin_method() -> Counting:
    numbers = list(range(100, 0, -1))
    return Counting(numbers.pop)


def partial() -> Counting:
    return Counting(functools.partial(lambda seen: (seen.append(1), len(seen))[1], []))


def decorated() -> Counting:
    def count() -> int:
        count.calls += 1  # type: ignore[attr-defined]
        return count.calls  # type: ignore[attr-defined]

    count.calls = 0  # type: ignore[attr-defined]
    return Counting(count)


def default() -> Counting:
    def count(seen: list[int] = []) -> int:  # noqa: B006
        seen.append(1)
        return len(seen)

    return Counting(count)


class OfItsClass(Counting):
    calls = 0

    def number(self) -> float:
        type(self).calls += 1
        return type(self).calls


class OfAGlobalList(Counting):
    def number(self) -> float:
        BANK.append(torch.ones(1))
        return len(BANK)


class OfAGlobalNumber(Counting):
    def number(self) -> float:
        return self.counted()

    @staticmethod
    def counted() -> float:
        global CALLS
        CALLS += 1
        return CALLS


class Numbers(list[int]):
    total = 0


class OfAList(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = Numbers()

    def number(self) -> float:
        self.numbers.total += 1
        return self.numbers.total


class OfAnArray(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.seen = array("d")

    def number(self) -> float:
        self.seen.append(1.0)
        return len(self.seen)


class OfObjects(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.seen = np.array([[], None], dtype=object)

    def number(self) -> float:
        self.seen[0].append(1)
        return len(self.seen[0])


class OfASparseBuffer(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(5).to_sparse())

    def number(self) -> float:
        self.seen.add_(torch.ones(5).to_sparse())
        return self.seen.to_dense()[0].item()


def of_generated_code() -> Counting:
    space: dict[str, Any] = {}
    exec("seen = []\ndef count():\n    seen.append(1)\n    return len(seen)", space)
    return Counting(space["count"])


CASES: list[Callable[[], Counting]] = [
    *(rebound, appended, of_a_method, of_a_builtin_method, partial, decorated, default, of_generated_code),
    *(OfItsClass, OfAGlobalList, OfAGlobalNumber, OfAList, OfAnArray, OfObjects, OfASparseBuffer),
]


@pytest.fixture(autouse=True)
def _anew() -> None:
    global CALLS
    BANK.clear()
    CALLS = OfItsClass.calls = 0


@pytest.mark.parametrize("make", CASES)
def test_each_trial_finds_the_same(make: Callable[[], Counting]) -> None:
    module = make()
    with torch.no_grad():
        module.number()
        found: list[float] = []
        for _ in range(2):
            with preserved([module]):
                found.append(module.number())
        assert found == [module.number()] * 2
        assert module.number() != found[0]


@pytest.mark.slow
@pytest.mark.parametrize("make", [rebound, OfItsClass, OfAGlobalNumber])
def test_planning_leaves_no_trace(make: Callable[[], Counting]) -> None:
    module, x = make(), torch.randn(64, 8)
    with pytest.raises(InfeasibleBudgetError):
        rematerialize(module, x, memory_budget=1)
    rematerialize(module, x, memory_budget="100%")
    assert module.number() == 1


def test_an_optimizer_that_a_hook_holds() -> None:
    module = nn.Linear(4, 4)
    optimizers = {p: torch.optim.Adam([p], 0.1) for p in module.parameters()}
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(lambda p: (optimizers[p].step(), optimizers[p].zero_grad())[1])
    x = torch.randn(3, 4)
    module(x).square().sum().backward()
    before = [float(o.state[p]["step"]) for p, o in optimizers.items()]
    with preserved([module]):
        module(x).square().sum().backward()
        assert [float(o.state[p]["step"]) for p, o in optimizers.items()] == [2.0, 2.0]
    assert [float(o.state[p]["step"]) for p, o in optimizers.items()] == before == [1.0, 1.0]


class Slotted:
    """Has room for an attribute, and none yet."""

    __slots__ = ("late",)


def test_what_was_bound_to_nothing_is_so_again() -> None:
    late: list[int]

    def bind() -> None:
        nonlocal late
        late = [1]

    def bound() -> list[int]:
        return late

    module: Any = nn.Identity()
    module.slotted, module.bind = Slotted(), bind
    with preserved([module]):
        module.slotted.late = 1
        bind()
    assert not hasattr(module.slotted, "late")
    with pytest.raises(NameError):
        bound()
    late = [2]
    with preserved([module]):
        bind()
    assert bound() == [2]


class HoldsNames:
    """As a kernel of Triton does, which holds the names of the file that it is in."""

    def __init__(self) -> None:
        self.names = globals()


def test_names_that_a_capture_adds_to_a_file_stay() -> None:
    """Compiled code reads them later."""
    module = nn.Linear(2, 2)
    module.kernel = HoldsNames()
    before = CALLS
    try:
        with preserved([module]):
            globals()["__compiled_fn_0"] = globals()["CALLS"] = 7
        assert globals()["__compiled_fn_0"] == 7
        assert before == CALLS
    finally:
        globals().pop("__compiled_fn_0", None)


def test_files_of_others_are_told_by_their_folders() -> None:
    package = Path(lightning_remat.__file__).parent
    assert not is_own_file(str(package / "errors.py"))
    assert is_own_file(str(package.with_name("lightning_remat_experiments") / "train.py"))
    assert not is_own_file("/usr/lib/python3/dist-packages/torch/nn/modules/linear.py")
    assert is_own_file("<ipython-input-1>")
    assert not is_own_file("<frozen importlib._bootstrap>")
