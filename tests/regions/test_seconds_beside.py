"""What a step takes beside its operations counts in the step that recomputation is told a fraction of."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from least_budgets import least_budget, rematerialized
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_remat import Plan
from lightning_remat.lowering import keep_everything
from lightning_remat.regions import rewriter, step_run, whole
from lightning_remat.regions.step_run import beside_operations
from lightning_remat.schedules.simulator import simulate

X = torch.randn(64, 32)


class Clock:
    """Says what each forward and each backward took."""

    def __init__(self, seconds: list[float]) -> None:
        self._left: Iterator[float] = iter(seconds)
        self.seconds = 0.0

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = next(self._left)


class Counts(nn.Module):
    """Draws, counts and normalizes."""

    num_calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 32))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        type(self).num_calls += 1
        self.calls += 1
        return self.net(x)


class Frozen(nn.Module):
    """Nothing in it has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def clocked(monkeypatch: pytest.MonkeyPatch, forward: list[float], backward: list[float]) -> None:
    clocks = iter([Clock(forward), Clock(backward)])
    monkeypatch.setattr(step_run, "Stopwatch", lambda _: next(clocks))


def test_the_fastest_of_a_few_steps_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked(monkeypatch, [0.5, 0.25, 1.0], [0.5, 0.5, 0.25])
    assert beside_operations(Counts(), (X,), {}, 0.5, 1000) == 0.25


def test_a_step_faster_than_its_operations_has_nothing_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked(monkeypatch, [0.25] * 3, [0.125] * 3)
    assert beside_operations(Counts(), (X,), {}, 0.5, 1000) == 0.0


def test_long_operations_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counts, "num_calls", 0)
    assert beside_operations(Counts(), (X,), {}, 0.5, 4) == 0.0
    assert not Counts.num_calls, "and no step is run to find that out"


def test_where_no_gradients_can_be_asked_for_none_is_told() -> None:
    assert beside_operations(Frozen(), (X,), {}, 0.0, 4) == 0.0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_tell_none(device: str) -> None:
    with FakeTensorMode(), torch.device(device):
        module, x = Counts(), torch.empty(64, 32)
    assert beside_operations(module, (x,), {}, 0.0, 4) == 0.0


def test_the_steps_leave_nothing_behind() -> None:
    module = Counts()
    module(X).sum().backward()
    gradients = [p.grad for p in module.parameters()]
    values = copy.deepcopy(gradients)
    state, drawn = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    assert beside_operations(module, (X,), {}, 0.0, 4) > 0
    assert all(torch.equal(a, b) for a, b in zip(state.values(), module.state_dict().values(), strict=True))
    assert all(p.grad is g for p, g in zip(module.parameters(), gradients, strict=True))
    assert all(g is not None and torch.equal(g, v) for g, v in zip(gradients, values, strict=True))
    assert torch.equal(drawn, torch.get_rng_state())


class TakesApart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.linear(batch.pop("x"))


def test_each_step_has_a_batch_of_its_own() -> None:
    batch = {"x": X}
    assert beside_operations(TakesApart(), (batch,), {}, 0.0, 4) > 0
    assert batch.keys() == {"x"}


class Breaks(nn.Module):
    """No single graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(*(sigmoids() for _ in range(3))) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def sigmoids() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Sigmoid(), nn.Tanh())


def operations_alone(plan: Plan) -> float:
    graphs = {"": plan.graph} if plan.step is None else plan.step.graphs
    return sum(simulate(graph, keep_everything(graph)).seconds for graph in graphs.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "parts"])
def test_recomputation_is_told_as_a_fraction_of_the_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_a_second(*_: Any, **__: Any) -> float:
        return 1.0

    for place in (whole, rewriter):
        monkeypatch.setattr(place, "beside_operations", takes_a_second)
    module = nn.Sequential(*(sigmoids() for _ in range(6))) if kind == "whole" else Breaks()
    for budget in (least_budget(module, X), 1 << 30):
        plan = rematerialized(module, X, budget=budget)
        assert (plan.step is None) == (kind == "whole")
        assert bool(plan.num_recomputed) == (budget < 1 << 30)
        assert plan.beside_seconds == 1.0
        assert plan.plain.seconds == pytest.approx(1.0 + operations_alone(plan))
        recomputed = plan.simulation.recompute_seconds
        assert plan.simulation.seconds == pytest.approx(plan.plain.seconds + recomputed)
        assert plan.recompute_overhead == recomputed / plan.plain.seconds < 0.5
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_what_draws_is_not_timed_where_other_threads_draw_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers would be put back, or seeing that they are not would take the most of the time."""

    def is_not_asked(*_: Any, **__: Any) -> float:
        raise AssertionError

    monkeypatch.setattr(whole, "beside_operations", is_not_asked)
    module = nn.Sequential(*(nn.Sequential(sigmoids(), nn.Dropout(0.5)) for _ in range(4)))
    assert rematerialized(module, X, budget=least_budget(module, X)).num_recomputed
