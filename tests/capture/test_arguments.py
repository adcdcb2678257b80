"""Arguments that a forward changes, or that hide tensors: refused with the reason, and left as they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import TraceError, rematerialize, trace

X = torch.randn(4, 6)


class Memory:
    """As caches of transformers are: an object with tensors in objects in a list."""

    def __init__(self, values: Any = ()) -> None:
        self.layers, self.count = list(values), 0


class Takes(nn.Module):
    """Does something with an argument beside the tensor."""

    def __init__(self, does: Callable[[Any, Tensor], object], *, is_opaque: bool = False) -> None:
        super().__init__()
        self.layer, self.does, self.is_opaque = nn.Linear(6, 6), does, is_opaque

    def forward(self, x: Tensor, extra: Any) -> Tensor:
        y = self.layer(x).sigmoid()
        if self.is_opaque and y.sum() < -1e9:
            y = -y
        self.does(extra, y)
        return y.sigmoid()


def counts(memory: Memory, y: Tensor) -> None:
    memory.count += 1


@pytest.mark.parametrize(
    ("extra", "does", "message"),
    [
        (dict, lambda d, y: d.update(y=y), "changes a list, dict or dataclass"),
        (list, lambda c, y: c.append(y), "changes a list, dict or dataclass"),
        (Memory, lambda m, y: m.layers.append(y), "changes the attribute 'layers' of an argument of type Memory"),
        (lambda: Memory([Memory()]), lambda m, y: setattr(m.layers[0], "y", y), "changes the attribute 'y'"),
        (Memory, counts, "changes the attribute 'count' of an argument of type Memory"),
        (lambda: Memory([Memory([X])]), lambda m, y: None, "argument of type Memory holds tensors"),
    ],
)
def test_what_a_forward_changes_in_its_arguments_is_refused(
    extra: Callable[[], Any], does: Callable[[Any, Tensor], object], message: str
) -> None:
    module, given = Takes(does), extra()
    before = repr(given) if not isinstance(given, Memory) else (list(given.layers), given.count)
    with pytest.raises(TraceError, match=message):
        trace(module, X, given)
    assert before == (repr(given) if not isinstance(given, Memory) else (list(given.layers), given.count))


def test_an_object_that_is_only_read_is_a_constant() -> None:
    def scales(memory: Memory, y: Tensor) -> None:
        assert memory.count == 0

    assert len(trace(Takes(scales), X, Memory()).operations) == 3


@dataclass
class State:
    y: Tensor


class Hands(nn.Module):
    """Gives a submodule that runs as one operation something to write into, and reads it."""

    def __init__(self, make: Callable[[Tensor], Any], does: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.first, self.make = nn.Linear(6, 6), make
        self.part = Takes(does, is_opaque=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).sigmoid()
        state = self.make(y)
        z = self.part(y, state)
        return z * (state.y if isinstance(state, State) else state["y"])


@pytest.mark.parametrize(
    ("make", "does", "message"),
    [
        (State, lambda s, y: setattr(s, "y", y), "part changes a dataclass that it is called with"),
        (lambda y: {"y": y}, lambda d, y: d.update(y=y), "does not support mutation"),
    ],
)
def test_what_an_opaque_submodule_writes_into_stops_the_trace(
    make: Callable[[Tensor], Any], does: Callable[[Any, Tensor], object], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        trace(Hands(make, does), X)
    with pytest.raises(TraceError, match=r"part: Takes\.forward cannot be traced"):
        rematerialize(Hands(make, does), X, memory_budget="90%", planner="periodic")
