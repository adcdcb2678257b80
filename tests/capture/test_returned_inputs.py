"""A submodule that returns its own input: predicted, recomputed, and the same in every bit."""

from typing import Any

import pytest
import torch
from rewriting import assert_equal_steps, rewrite
from torch import Tensor, nn
from training_steps import step_peak

from benchmarks.peaks import LOSS_BYTES
from lightning_remat import profile, simulate, trace
from lightning_remat.lowering import lower_kept


class ReturnsItsInput(nn.Module):
    """Returns what it got beside what it made, nested as told."""

    def __init__(self, nested: str = "pair") -> None:
        super().__init__()
        self.layer, self.nested = nn.Linear(64, 64), nested

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x).sigmoid()
        if self.nested == "pair":
            return y, x
        return {"made": y, "given": [x, (x if self.nested == "dict" else x.view_as(x),)]}


class ReadsBoth(nn.Module):
    def __init__(self, nested: str = "pair", *, returns: bool = False) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(64, 64), ReturnsItsInput(nested)
        self.left, self.right, self.returns = nn.Linear(64, 64), nn.Linear(64, 64), returns

    def forward(self, x: Tensor) -> Any:
        found = self.part(self.first(x).sigmoid())
        y, z = found if self.part.nested == "pair" else (found["made"], found["given"][1][0])
        result = self.left(y.sigmoid()).sigmoid() + self.right(z * 2).sigmoid()
        return (result, z) if self.returns else result


class ReadsWhole(ReadsBoth):
    """Hands on what it got as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = SumsUp()

    def forward(self, x: Tensor) -> Tensor:
        found = self.part(self.first(x).sigmoid())
        return self.left(self.sum(found)) + self.right(found[1])


class SumsUp(nn.Module):
    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        return sum(values)


KEPT = (), (0, 1), (2,), (1, 2)


def measured_and_predicted(nested: str, kept: tuple[int, ...]) -> tuple[int, int]:
    module, x = ReadsBoth(nested), torch.randn(2000, 64)
    graph = profile(trace(module, x), x, repeats=1)
    rewrite(module, kept, x)
    return step_peak(module, x) - LOSS_BYTES, simulate(graph, lower_kept(graph, kept)).peak_bytes


@pytest.mark.sampled
@pytest.mark.parametrize("nested", ["pair", "dict", "view"])
@pytest.mark.parametrize("kept", KEPT)
def test_peaks_are_predicted(nested: str, kept: tuple[int, ...]) -> None:
    measured, predicted = measured_and_predicted(nested, kept)
    assert measured == predicted


@pytest.mark.slow
@pytest.mark.parametrize("module", [ReadsBoth(), ReadsBoth("dict"), ReadsBoth(returns=True), ReadsWhole()])
def test_steps_are_bitwise_equal(module: nn.Module) -> None:
    assert_equal_steps(module, torch.randn(3, 64), kept=((), (1,), (2,), (0, 3)))


@pytest.mark.slow
def test_a_returned_input_costs_nothing_and_is_the_same_tensor() -> None:
    x = torch.randn(3, 64)
    kinds = [o.kind for o in trace(ReadsBoth(), x).operations]
    assert kinds == [o.kind for o in trace(ReadsBoth("dict"), x).operations]
    assert len(kinds) == len(trace(ReadsBoth("view"), x).operations) - 1


class HandsBack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x).sigmoid().sigmoid(), x


def test_the_caller_gets_its_own_tensor_back() -> None:
    module, x = HandsBack(), torch.randn(3, 64)
    rewrite(module, (), x)
    assert module(x)[1] is x
