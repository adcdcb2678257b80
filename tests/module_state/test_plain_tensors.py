"""Tensors that modules hold in plain attributes and write in place: as buffers, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewriting import rewrite
from torch import Tensor, nn
from training_steps import assert_equal_traces, traces

from lightning_remat import TraceError, trace

X = torch.randn(4, 6)


class Keeps(nn.Module):
    """Reads and writes a tensor that is no buffer; runs as one operation where it is opaque."""

    def __init__(self, where: Callable[[Any], Tensor], *, is_opaque: bool, is_constant: bool) -> None:
        super().__init__()
        self.layer, self.where, self.is_opaque, self.is_constant = nn.Linear(6, 6), where, is_opaque, is_constant
        self.cache, self.caches, self.table = torch.zeros(6), [torch.zeros(6)], {"a": (torch.zeros(6),)}

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).sigmoid()
        if self.is_opaque and y.sum() < -1e9:
            y = -y
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
@pytest.mark.parametrize("is_opaque", [False, True])
def test_an_attribute_written_in_place_is_kept_as_a_buffer_is(is_opaque: bool, is_constant: bool) -> None:
    plain = Within(Keeps(lambda m: m.cache, is_opaque=is_opaque, is_constant=is_constant))
    ours = copy.deepcopy(plain)
    rewrite(ours, (), X)
    assert all(torch.equal(t, torch.zeros(6)) for t in ours.part.held())
    assert_equal_traces(traces(plain, [X] * 3), traces(ours, [X] * 3))
    assert torch.equal(plain.part.cache, ours.part.cache)
    assert plain.part.cache.abs().sum() > 0


@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize("where", [lambda m: m.caches[0], lambda m: m.table["a"][0]], ids=["list", "dict"])
@pytest.mark.parametrize("is_opaque", [False, True])
def test_one_in_a_container_is_refused_and_stays_as_it_was(is_opaque: bool, where: Any, is_constant: bool) -> None:
    module = Within(Keeps(where, is_opaque=is_opaque, is_constant=is_constant))
    with pytest.raises(TraceError, match=r"(writes in place into a tensor|changes '(caches|table)').*in a buffer"):
        trace(module, X)
    assert all(torch.equal(t, torch.zeros(6)) for t in module.part.held())


class Writes(nn.Module):
    """Fills a tensor that it makes from constants, and one that lives outside."""

    def __init__(self, outside: Tensor | None = None) -> None:
        super().__init__()
        self.layer, self.outside = nn.Linear(6, 6), (lambda: outside)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).sigmoid()
        table = self.outside()
        table = torch.zeros(4, 6) if table is None else table
        table[1:] = y[1:] * 2
        table += y
        return (y * table).sigmoid()


def test_a_tensor_made_from_constants_is_made_anew_in_each_call() -> None:
    plain = Writes()
    ours = copy.deepcopy(plain)
    rewrite(ours, (), X)
    assert_equal_traces(traces(plain, [X] * 3), traces(ours, [X] * 3))
    outside = torch.zeros(4, 6)
    with pytest.raises(TraceError, match="writes in place into a tensor that is no buffer and that no call makes anew"):
        trace(Writes(outside), X)
    assert torch.equal(outside, torch.zeros(4, 6))


class Late(nn.Module):
    """Begins to write into a tensor in a list once it has been traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.held, self.steps = nn.Linear(6, 6), [torch.zeros(6)], nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = (self.layer(x) * (1 + self.held[0])).sigmoid()
        if self.steps > 0:
            self.held[0] += y.detach().mean(0)
        self.steps += 1
        return y


def test_a_write_that_no_trace_has_seen_is_an_error_of_the_backward() -> None:
    ours = Within(Late())
    rewrite(ours, (), X)
    ours(X).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation: a tensor in the attribute held"):
        ours(X).sum().backward()
