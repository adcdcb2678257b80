"""Tensors that modules hold in plain attributes, or find elsewhere, and write in place: as buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewriting import rewrite
from torch import Tensor, nn
from training_steps import assert_equal_traces, traces

X = torch.randn(4, 6)


class Keeps(nn.Module):
    """Reads and writes a tensor that is no buffer."""

    def __init__(self, where: Callable[[Any], Tensor], *, is_constant: bool) -> None:
        super().__init__()
        self.layer, self.where, self.is_constant = nn.Linear(6, 6), where, is_constant
        self.cache, self.caches, self.table = torch.zeros(6), [torch.zeros(6)], {"a": (torch.zeros(6),)}

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).sigmoid()
        y = (y * (1 + self.where(self))).sigmoid()
        self.where(self).add_(1.0 if self.is_constant else y.detach().mean(0))
        return y.sigmoid()

    def held(self) -> list[Tensor]:
        return [self.cache, *self.caches, *self.table["a"]]


class Within(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(6, 6), part, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(self.first(x).sigmoid())).sigmoid()


@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize(
    "where", [lambda m: m.cache, lambda m: m.caches[0], lambda m: m.table["a"][0]], ids=["attribute", "list", "dict"]
)
def test_an_attribute_written_in_place_is_as_a_buffer(where: Callable[[Any], Tensor], is_constant: bool) -> None:
    plain = Within(Keeps(where, is_constant=is_constant))
    ours = copy.deepcopy(plain)
    rewrite(ours, (), X)
    assert all(torch.equal(t, torch.zeros(6)) for t in ours.part.held())
    assert_equal_traces(traces(plain, [X] * 3), traces(ours, [X] * 3))
    assert all(torch.equal(a, b) for a, b in zip(plain.part.held(), ours.part.held(), strict=True))
    assert where(plain.part).abs().sum() > 0


class Writes(nn.Module):
    """Fills a tensor that it makes from constants, and one that lives outside."""

    def __init__(self, outside: Tensor | None = None) -> None:
        super().__init__()
        self.layer, self.outside = nn.Linear(6, 6), (lambda: outside)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).sigmoid()
        table = self.outside()
        table = torch.zeros(4, 6) if table is None else table
        table[1:] = y[1:].detach() * 2
        table += y.detach()
        return (y * table.detach()).sigmoid()


def test_a_tensor_made_from_constants_is_made_anew_in_each_call() -> None:
    plain = Writes()
    ours = copy.deepcopy(plain)
    rewrite(ours, (), X)
    assert_equal_traces(traces(plain, [X] * 3), traces(ours, [X] * 3))


def test_a_tensor_that_lives_outside_is_written_once_a_call() -> None:
    outside, found = torch.zeros(4, 6), []
    module = Writes(outside)
    for is_ours in (False, True):
        m = copy.deepcopy(module)
        m.outside = module.outside
        outside.zero_()
        if is_ours:
            rewrite(m, (), X)
            assert torch.equal(outside, torch.zeros(4, 6))
        found.append([*(writes(m) for _ in range(3)), outside.tolist()])
    assert found[0] == found[1]
    assert outside.abs().sum() > 0


def writes(module: nn.Module) -> list[Any]:
    module.zero_grad()
    loss = module(X).sum()
    loss.backward()
    return [loss.item(), *(p.grad.tolist() for p in module.parameters())]


class Late(nn.Module):
    """Begins to write into a tensor in a list once it has been traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.held, self.writes = nn.Linear(6, 6), [torch.zeros(6)], False

    def forward(self, x: Tensor) -> Tensor:
        y = (self.layer(x) * (1 + self.held[0])).sigmoid()
        if self.writes:
            self.held[0] += y.detach().mean(0)
        return y.sigmoid()


def test_a_write_that_begins_later_is_captured_anew() -> None:
    plain = Within(Late())
    ours = copy.deepcopy(plain)
    rewrite(ours, (), X)
    for step in range(4):
        for m in (plain, ours):
            m.part.writes = step > 0
        assert writes(plain) == writes(ours)
        assert torch.equal(plain.part.held[0], ours.part.held[0])
    assert plain.part.held[0].abs().sum() > 0
