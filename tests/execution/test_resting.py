"""What autograd holds as it was handed over rests from the second step on: as plain autograd, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from resting_cases import Between, rested, resting_copy
from torch import Tensor, nn
from training_steps import assert_equal_traces, traces

X = torch.randn(4, 6)


def assert_rests_as_plain(module: nn.Module, batches: Sequence[Tensor], *, at_least: int = 1) -> None:
    """Steps with what rests are the plain ones."""
    ours = resting_copy(module, batches[0])
    assert_equal_traces(traces(copy.deepcopy(module), batches), traces(ours, batches))
    assert rested(ours) >= at_least


CHAINS: dict[str, Callable[[Between, Tensor], Tensor]] = {
    "linear": lambda m, x: m.c(F.gelu(m.b(F.gelu(m.a(x))))),
    "layer norm": lambda m, x: m.c(F.gelu(F.layer_norm(m.b(F.silu(m.a(x))), (6,)))),
    "view": lambda m, x: m.c(F.gelu(m.a(x)).view(-1, 2, 3).flatten(1)) * m.b(x),
    "views of views": lambda m, x: (
        (h := F.gelu(m.a(x)).view(-1, 2, 3)).transpose(1, 2)[:, :2] * h[:, :, :2]
    ).sigmoid(),
    "views of which one is read later": lambda m, x: m.b(h := F.gelu(m.a(x))).sigmoid().mul(h[:, :6]) * h.view(-1, 6),
    "chunks": lambda m, x: m.c(torch.cat([(h := F.gelu(m.a(x)).chunk(2, 1))[0] * h[1].sigmoid(), h[1]], 1)),
    "items": lambda m, x: m.c(
        torch.stack([(h := F.gelu(m.a(x)).view(-1, 3, 2).unbind(1))[0] * h[1], *h[1:]], 1).view(-1, 6)
    ),
    "in place": lambda m, x: m.c(F.relu(m.a(x), inplace=True)) * m.b(x).sin().mul_(2).sigmoid(),
    "residual": lambda m, x: m.c((h := F.gelu(m.a(x))) + F.gelu(m.b(h))) + h,
    "dropout": lambda m, x: m.c(F.dropout(F.gelu(m.b(F.dropout(F.gelu(m.a(x)), 0.5))), 0.5)),
    "several": lambda m, x: m.c(F.gelu(m.a(x)).sort(1)[0]) * F.gelu(m.b(x)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CHAINS)
def test_steps_are_the_plain_ones(name: str) -> None:
    assert_rests_as_plain(Between(CHAINS[name]), [X, X + 1, X, X - 1])


class Cells(nn.Module):
    """Reads items of tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x
        for _ in range(3):
            h, c = self.cell(x, (h, c))
        return h


@pytest.mark.slow
def test_items_of_tuples_rest() -> None:
    assert_rests_as_plain(Cells(), [X, X + 1, X, X])


@pytest.mark.slow
def test_images_rest() -> None:
    block = [nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.GELU()]
    module = nn.Sequential(*copy.deepcopy(block), *copy.deepcopy(block), nn.Flatten(), nn.Linear(32, 3))
    x = torch.randn(3, 2, 4, 4)
    assert_rests_as_plain(module, [x, x + 1, x])


@pytest.mark.sampled
@pytest.mark.parametrize(
    "same",
    [
        lambda t: t.contiguous(),
        lambda t: t.float(),
        lambda t: t.to(t.dtype),
        lambda t: t.type_as(t),
        lambda t: F.dropout(t, 0.0),
    ],
)
def test_a_tensor_that_two_operations_return_does_not_rest_when_the_first_is_done(same: Any) -> None:
    def forward(m: Between, x: Tensor) -> Tensor:
        h = F.gelu(m.a(x))
        return m.c(F.gelu(m.b(same(h)))) * h

    assert_rests_as_plain(Between(forward), [X, X + 1, X])


@pytest.mark.slow
def test_a_view_that_was_the_whole_is_a_part_of_another_batch() -> None:
    def forward(m: Between, x: Tensor) -> Tensor:
        h = F.gelu(m.a(x))
        return m.c(F.gelu(m.b(h[: h.shape[0] // 2 * 2])))

    assert_rests_as_plain(Between(forward), [torch.randn(n, 6) for n in (4, 4, 6, 5, 7, 4, 3)])
