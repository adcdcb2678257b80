"""The step that planning runs leaves nothing behind, in the module or beside it."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from drawing_threads import drawing_beside
from least_budgets import least_budget, rematerialized
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_remat import measure_peak
from lightning_remat.regions import step_run
from lightning_remat.regions.step_run import run_backward, step_outcome

X = torch.randn(256, 32)


class Counts(nn.Module):
    """Draws, counts and normalizes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Sigmoid(), nn.Linear(32, 32)
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x).sigmoid() * random.random()


@pytest.mark.slow
def test_the_step_that_is_run_leaves_nothing_behind() -> None:
    module = Counts()
    module(X).sum().backward()
    state = copy.deepcopy(module.state_dict())
    gradients = [p.grad for p in module.parameters()]
    values = [None if g is None else g.clone() for g in gradients]
    drawn, python = torch.get_rng_state(), random.getstate()
    plan = rematerialized(module, X, budget=least_budget(module, X))
    assert plan.num_recomputed
    assert all(torch.equal(a, b) for a, b in zip(state.values(), module.state_dict().values(), strict=True))
    assert all(p.grad is g for p, g in zip(module.parameters(), gradients, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, values, strict=True))
    assert torch.equal(drawn, torch.get_rng_state())
    assert random.getstate() == python


@pytest.mark.slow
def test_a_thread_draws_as_if_it_were_alone() -> None:
    module, budget = Counts(), 1 << 30
    rematerialized(module, X, budget=budget)
    with drawing_beside():
        for _ in range(2):
            step_run.step_peak(module, (X,), {}, is_module_alone=True)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(32, 32), nn.GELU())))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.net(x), x)


def test_a_loss_is_held_as_loops_hold_it() -> None:
    """That of `mse_loss` is a number in as much memory as its input takes, on the CPU."""
    module = Autoencoder()
    with measure_peak(include=[module, X]) as measured:
        loss = module(X)
        loss.backward()
    found = step_run.step_peak(module, (X,), {}, is_module_alone=True)
    assert abs(found - measured.peak_bytes) <= loss.element_size()


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Sigmoid(), nn.Dropout(0.5), nn.Tanh())


@pytest.mark.slow
def test_a_thread_draws_as_if_it_were_alone_while_modules_are_planned() -> None:
    first, *modules = [nn.Sequential(*(block() for _ in range(4))) for _ in range(4)]
    budget = least_budget(first, X)
    with drawing_beside():
        for module in modules:
            plan = rematerialized(module, X, budget=budget)
            assert plan.rung == "traced"
            assert plan.num_recomputed


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.first(x), use_reentrant=True)


def test_a_whole_backward_where_a_checkpoint_asks_for_it_fires_no_optimizer() -> None:
    module, fired = Reentrant(), []
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(fired.append)
    module(X).sum().backward()
    wanted = {n: p.grad for n, p in module.named_parameters()}
    module.zero_grad()
    fired.clear()
    targets = list(module.parameters())
    found = run_backward([module(X)], targets, torch.ones_like)
    assert not fired
    assert all(torch.equal(g, w) for g, w in zip(found, wanted.values(), strict=True))
    module.zero_grad()
    outcome = step_outcome(module, (X,), {})
    assert all(f"gradient of {name}" in outcome for name in wanted)
    assert all(p.grad is None for p in targets)
    module(X).sum().backward()
    assert len(fired) == len(targets)


def test_a_step_whose_backward_must_be_whole_is_not_timed() -> None:
    module = Reentrant()
    assert step_run.beside_operations(module, (X,), {}, 0.0, 4) == 0.0
    assert all(p.grad is None for p in module.parameters())
