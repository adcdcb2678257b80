"""Containers whose classes make something else of reading and writing are put back as what they hold."""

from __future__ import annotations

import copy
import itertools
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from training_steps import assert_equal_traces, traces
from transformers.activations import ACT2FN
from transformers.modeling_outputs import ModelOutput

from lightning_remat import rematerialize
from lightning_remat.module_state.containers import content_of
from lightning_remat.module_state.preserve import preserved


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise TypeError("not by this way")


class Made(OrderedDict[str, Any]):
    """Makes what it is asked for, as `ACT2FN` does, and tells other lengths and items than it holds."""

    def __getitem__(self, key: str) -> NoReturn:
        _refuse()

    keys = values = items = __iter__ = __contains__ = get = _refuse  # pyright: ignore

    def __len__(self) -> int:
        return 7


class Frozen(dict[str, Any]):
    """Is not to be written to."""

    __setitem__ = __delitem__ = clear = update = pop = popitem = setdefault = _refuse  # pyright: ignore


class Backwards(list[int]):
    """Is read the other way round, and written to by a way of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(self[::-1])

    clear = extend = append = __setitem__ = _refuse  # pyright: ignore


class Bounded(deque[int]):
    """Writes twice what it is given."""

    def extend(self, iterable: Any) -> None:
        super().extend([*iterable, *iterable])


class Loud(set[int]):
    """Is written to by `add` alone."""

    clear = update = _refuse  # pyright: ignore


@dataclass
class Result(ModelOutput):
    """As models of transformers return; refuses most ways to write to it."""

    a: Tensor | None = None
    b: Tensor | None = None


HELD: dict[str, Any] = {
    "made": lambda: Made(a=1, b=[2]),
    "frozen": lambda: Frozen(a=1, b=[2]),
    "counted": lambda: Counter("abca"),
    "by default": lambda: defaultdict(list, a=[1]),
    "result": lambda: Result(a=torch.ones(2), b=torch.zeros(1)),
    "backwards": lambda: Backwards([1, 2, 3]),
    "bounded": lambda: Bounded([1, 2, 3], maxlen=5),
    "loud": lambda: Loud([1, 2, 3]),
    "bytes": lambda: bytearray(b"abc"),
    "numbers": lambda: array("d", [1.0, 2.0]),
}


def _disturb(held: Any) -> None:
    if isinstance(held, OrderedDict):
        OrderedDict.__setitem__(held, "c", 3)
        OrderedDict.move_to_end(held, "a")
    elif isinstance(held, dict):
        dict.__setitem__(held, "c", 3)
        dict.__delitem__(held, "a")
    elif isinstance(held, set):
        set.add(held, 4)
    elif isinstance(held, list):
        list.append(held, 4)
        list.reverse(held)
    else:
        held.append(4)


@pytest.mark.parametrize("name", HELD)
def test_they_are_put_back(name: str) -> None:
    module, held = nn.Identity(), HELD[name]()
    module.held = held
    before = content_of(held)
    with preserved([module]):
        _disturb(held)
        assert content_of(held) != before or list(content_of(held)) != list(before)
    assert module.held is held
    found = content_of(held)
    assert list(found) == list(before)
    if isinstance(before, dict):
        assert all(found[name] is value for name, value in before.items())


def test_an_iterator_in_one_is_where_it_was() -> None:
    module: Any = nn.Identity()
    module.held = Frozen(numbers=(k * k for k in range(5)), count=itertools.count(3))
    for _ in range(2):
        with preserved([module]):
            assert [next(module.held["numbers"]) for _ in range(2)] == [0, 1]
            assert next(module.held["count"]) == 3
    assert [next(module.held["numbers"]) for _ in range(3)] == [0, 1, 4]
    assert next(module.held["count"]) == 3


class Activated(nn.Module):
    """Names a table that makes modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.act = ACT2FN["gelu"]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (self.act(layer(x)) if "gelu" in ACT2FN else x)
        return x


def test_a_table_of_activations_that_code_names() -> None:
    torch.manual_seed(0)
    module, x = Activated(), torch.randn(64, 8)
    before = OrderedDict.__len__(ACT2FN)
    plain = traces(copy.deepcopy(module), [x, x + 1])
    rematerialize(module, x, memory_budget="60%")
    assert_equal_traces(plain, traces(module, [x, x + 1]))
    assert OrderedDict.__len__(ACT2FN) == before
