"""A trial draws random numbers of its own: the shared generators stay where they are, whoever draws meanwhile."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drawing_threads import drawing_beside
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_steps import assert_equal_traces, traces

from lightning_remat import profile, rematerialize, trace
from lightning_remat.module_state.own_draws import OwnDraws

X = torch.ones(8, 32)


class Noisy(nn.Module):
    """Draws in its own code and in layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.first(x))
        return self.last(x + 0.1 * torch.randn_like(x))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: F.dropout(X),
        lambda: torch.rand(3),
        lambda: torch.randn(3, dtype=torch.float64),
        lambda: torch.rand_like(X),
        lambda: torch.randn_like(X),
        lambda: torch.randint(5, (3,)),
        lambda: torch.randint(2, 5, (3,)),
        lambda: torch.randperm(9),
        lambda: torch.bernoulli(X / 2),
        lambda: torch.multinomial(X, 2),
        lambda: torch.empty(4).normal_(),
        lambda: torch.empty(4).uniform_(2, 3),
        lambda: F.rrelu(X, training=True),
        lambda: F.gumbel_softmax(X),
        lambda: F.scaled_dot_product_attention(X[None], X[None], X[None], dropout_p=0.5),
        lambda: nn.LSTM(32, 8, 2, dropout=0.5)(X),
    ],
)
def test_shared_generators_stay(draw: Callable[[], Any]) -> None:
    torch.manual_seed(3)
    draw()  # whatever it makes (weights) is drawn as well
    before = torch.get_rng_state()
    with OwnDraws() as draws:
        draw()
    assert draws.num_draws
    assert torch.equal(torch.get_rng_state(), before)


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout, self.inner = dropout, nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)[None]
        return F.scaled_dot_product_attention(y, y, y, dropout_p=self.dropout)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_an_attention_draws_where_it_drops_something(dropout: float) -> None:
    module = Attention(dropout)
    state = torch.get_rng_state()
    with OwnDraws() as draws:
        module(X)
    assert bool(draws.num_draws) == bool(dropout)
    assert any(operation.is_random for operation in trace(module, X).operations) == bool(dropout)
    module(X)
    assert torch.equal(state, torch.get_rng_state()) != bool(dropout)


class Scheduled(nn.Module):
    """Its attentions drop more, or less, or nothing, from step to step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.blocks, self.step = nn.ModuleList(Attention(0.0) for _ in range(8)), step

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.dropout = (0.0, 0.1, 0.3, 0.0, 0.2)[self.step % 5]
            x = block(x)[0].sigmoid()
        self.step += 1
        return x


@pytest.mark.slow
@pytest.mark.parametrize("step", range(5))
def test_an_attention_that_begins_or_ceases_to_drop_something_repeats_it(step: int) -> None:
    module, x = Scheduled(step), torch.randn(16, 32)
    plain = copy.deepcopy(module)
    assert rematerialize(module, x, memory_budget="90%", planner="periodic").num_recomputed
    assert_equal_traces(traces(plain, [x] * 10), traces(module, [x] * 10))


def test_a_generator_of_the_callers_is_used() -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7))
    with OwnDraws():
        drawn = torch.rand(3, generator=torch.Generator().manual_seed(7))
    assert torch.equal(drawn, expected)


def test_a_thread_that_draws_beside_a_profile_draws_as_if_it_were_alone() -> None:
    module = Noisy()
    traced = trace(module, X)
    with drawing_beside():
        for _ in range(3):
            profile(traced, X, repeats=3)


@torch.library.custom_op("test_own_draws::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x * (1 + random.random() + np.random.rand()) + torch.rand(x.shape)  # noqa: NPY002


noisy.register_fake(torch.empty_like)
noisy.register_autograd(lambda ctx, gradient: gradient * 2)  # pyright: ignore


class UnseenDraws(nn.Module):
    """Calls what draws where no operation shows it."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.last = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)).tanh())


def unkept(x: Tensor) -> Any:
    return checkpoint(lambda h: F.dropout(h.sin(), 0.3).exp(), x, use_reentrant=False, preserve_rng_state=False)


@pytest.mark.parametrize("between", [noisy, unkept])
def test_planning_moves_no_generator_whoever_draws(between: Callable[[Tensor], Tensor]) -> None:
    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]  # noqa: NPY002

    module = UnseenDraws(between)
    before = states()
    assert rematerialize(module, torch.ones(256, 32), memory_budget="90%").rung == "traced"
    assert states() == before
