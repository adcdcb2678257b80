"""Calls that return nothing happen once in each forward, as in the plain one, and in no recomputation."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from asserting import assert_and_say_nothing, assert_finite
from torch import Tensor, nn
from training_steps import assert_equal_traces, traces

from lightning_remat import rematerialize, trace

X = torch.randn(32, 16)
told: list[float] = []


@torch.library.custom_op("lightning_remat_tests::tell", mutates_args=())
def tell(value: Tensor) -> None:
    """A custom operation, of a logger, say."""
    told.append(value.item())


@tell.register_fake
def _(value: Tensor) -> None:
    del value


class Acts(nn.Module):
    """Does something with what it has computed, in the middle and at the end."""

    def __init__(self, act: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.act = act
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = x + layer(x)
            if k % 2:
                self.act(x)
        return x


def both(act: Callable[[Tensor], object]) -> tuple[nn.Module, nn.Module]:
    plain = Acts(act)
    ours = copy.deepcopy(plain)
    plan = rematerialize(ours, X, memory_budget="80%")
    assert plan.num_recomputed
    assert plan.step is None  # in one piece
    return plain, ours


@pytest.mark.slow
@pytest.mark.parametrize(("act", "message"), [(assert_finite, "not finite"), (assert_and_say_nothing, "")])
def test_an_assertion_fails_as_in_the_plain_forward(act: Callable[[Tensor], object], message: str) -> None:
    pair = both(act)
    for module in pair:
        with pytest.raises(AssertionError) as raised:
            module(X * float("nan"))
        assert str(raised.value) == message
    assert_equal_traces(*(traces(module, [X, X * 2, X]) for module in pair))


def test_an_assertion_is_no_part_of_a_recomputation() -> None:
    operations = trace(Acts(assert_finite), X).operations
    asserting = [o for o in operations if any(part.name.startswith("_assert") for part in o.parts)]
    assert len(asserting) == 2
    assert all(part in o.effects for o in asserting for part in o.parts if part.name.startswith(("_assert", "isfin")))


@pytest.mark.slow
def test_a_custom_operation_that_returns_nothing_is_called_as_often() -> None:
    found: list[list[float]] = []
    for module in both(lambda x: torch.ops.lightning_remat_tests.tell(x.detach().mean())):
        told.clear()
        traces(module, [X, X * 2, X])
        found.append([*told])
    assert found[0] == found[1]
    assert len(found[0]) == 6
