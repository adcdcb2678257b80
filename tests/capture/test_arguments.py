"""What a forward writes into its arguments arrives there as in the plain run, and a trace leaves them as they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rewriting import recomputing_copy, rematerialized_copy
from torch import Tensor, nn

from lightning_remat import trace

X = torch.randn(256, 6)


class Memory:
    """As caches of transformers are: an object with tensors in objects in a list."""

    def __init__(self, values: Any = ()) -> None:
        self.layers, self.count, self.y = list(values), 0, X


class Takes(nn.Module):
    """Does something with an argument beside the tensor, which may take a graph apart."""

    def __init__(self, does: Callable[[Any, Tensor], object], *, decides: bool = False) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.does, self.decides = does, decides

    def forward(self, x: Tensor, extra: Any) -> Tensor:
        y = self.layer(x).sigmoid().exp().sigmoid()
        if self.decides and y.sum() < -1e9:
            y = -y
        self.does(extra, y)
        return self.last(y.exp().sigmoid().exp().sigmoid())


def counts(memory: Memory, y: Tensor) -> None:
    memory.count += 1


ARGUMENTS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], object]]] = {
    "dict": (dict, lambda d, y: d.update(y=y)),
    "list": (list, lambda c, y: c.append(y)),
    "objects": (Memory, lambda m, y: m.layers.append(y)),
    "objects-in-objects": (lambda: Memory([Memory()]), lambda m, y: setattr(m.layers[0], "y", y)),
    "counts": (Memory, counts),
    "hidden": (lambda: Memory([Memory([X])]), lambda m, y: setattr(m, "y", y * m.layers[0].layers[0])),
}


def content(value: Any) -> Any:
    """The tensors and numbers of an argument."""
    if isinstance(value, Memory):
        return [content(value.layers), value.count, content(value.y)]
    if isinstance(value, dict):
        return {name: content(v) for name, v in value.items()}
    if isinstance(value, list):
        return [content(v) for v in value]
    return value.tolist() if isinstance(value, Tensor) else value


@pytest.mark.slow
@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_a_forward_writes_into_its_arguments_is_written_once(name: str, decides: bool) -> None:
    make, does = ARGUMENTS[name]
    plain, given = Takes(does, decides=decides), make()
    before = content(given)
    ours = (rematerialized_copy if decides else recomputing_copy)(plain, X, given)
    if not decides:
        assert content(given) == before
    found = []
    for module in (plain, ours):
        given = make()
        results = [module(X, given) for _ in range(2)]
        sum(results).square().sum().backward()
        found.append((content(results), content(given), content([p.grad for p in module.parameters()])))
    assert found[0] == found[1]
    assert found[0][1] != content(make())


def test_an_object_that_is_only_read_is_a_constant() -> None:
    def scales(memory: Memory, y: Tensor) -> None:
        assert memory.count == 0

    assert len(trace(Takes(scales), X, Memory()).operations) == 9


@dataclass
class State:
    y: Tensor


class Hands(nn.Module):
    """Gives a submodule that no graph holds as a whole something to write into, and reads it."""

    def __init__(self, make: Callable[[Tensor], Any], does: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.first, self.make = nn.Linear(6, 6), make
        self.part = Takes(does, decides=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).sigmoid()
        state = self.make(y)
        z = self.part(y, state)
        return z * (state.y if isinstance(state, State) else state["y"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "does"),
    [(State, lambda s, y: setattr(s, "y", y)), (lambda y: {"y": y}, lambda d, y: d.update(y=y))],
    ids=["dataclass", "dict"],
)
def test_what_a_submodule_writes_into_is_read_after_it(
    make: Callable[[Tensor], Any], does: Callable[[Any, Tensor], object]
) -> None:
    plain = Hands(make, does)
    found = []
    for module in (plain, rematerialized_copy(plain, X)):
        result = module(X)
        result.square().sum().backward()
        found.append([result.tolist(), *(p.grad.tolist() for p in module.parameters())])
    assert found[0] == found[1]
