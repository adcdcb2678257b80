"""Graphs that TorchDynamo captures again, more generally, while a step runs: the next step runs others."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training_steps import assert_equal_traces, step_peak, traces

from lightning_remat import Plan, rematerialize, restore
from lightning_remat.regions.calls import View
from lightning_remat.regions.look_through import look_through
from lightning_remat.regions.search import programs_of


class Layer(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = torch.tanh(step(x)).sigmoid()
        return x


class Halving(nn.Module):
    """Each of its pieces is called at half the length of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = Layer(), Layer()

    def half(self, x: Tensor) -> Tensor:
        return x.square()[:, ::2]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            if x.abs().max().item() < 0:
                raise ValueError
            x = self.half(self.layer(x))
        return self.last(x)


class InFunctions(Halving):
    """Nothing of its own forward is captured; what that calls is."""

    def half(self, x: Tensor) -> Tensor:
        return x.square()[:, 1::2]  # has code of its own: TorchDynamo remembers of which sizes that was called

    def forward(self, x: Tensor) -> Tensor:
        np.ceil(np.log(len(x))).astype("int").item()
        for _ in range(3):
            x = self.half(self.layer(x))
        return self.last(x)


class Numbered(Halving):
    """Its pieces are called with 0, 1, 2."""

    def part(self, x: Tensor, number: int) -> Tensor:
        x = self.layer(x).square()
        np.random.seed(number)  # noqa: NPY002
        return (torch.tanh(x) * number).sigmoid().tanh()

    def forward(self, x: Tensor) -> Tensor:
        for k in range(3):
            x = self.part(x, k)
        return self.last(x)


class Steady(Halving):
    """Its pieces are called at one length."""

    def half(self, x: Tensor) -> Tensor:
        return x.square()


KINDS = [Halving, InFunctions, Numbered, Steady]


def data() -> Tensor:
    return torch.randn(32, 32, 16, generator=torch.Generator().manual_seed(1))


def build(kind: type[Halving]) -> Any:
    torch.manual_seed(0)
    return kind()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_seen_is_what_all_further_steps_run(kind: type[Halving]) -> None:
    module, x = build(kind), data()
    runs: list[int] = []

    def step() -> None:
        runs[-1] += 1
        module(x)

    def look() -> View:
        runs.append(0)
        return look_through(module, step, ["[]"])

    seen = [look() for _ in range(3)]
    assert runs == ([1, 1, 1] if kind is Steady else [2, 1, 1]), "only what is outdated is run again"
    first, *others = [[(call.name, call.part and call.part.graph) for call in view.calls] for view in seen]
    assert len(first) > 3
    assert others == [first, first]
    shapes = {(call.name, tuple(t.shape for t in call.args)) for view in seen for call in view.calls}
    assert len(shapes) == len({name for name, _ in shapes}), "a name stands for one size"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", ["100%", "85%"])
def test_pieces_of_several_sizes_are_planned_each_and_results_are_the_plain_ones(
    kind: type[Halving], budget: str
) -> None:
    plain, x = build(kind), data()
    ours = copy.deepcopy(plain)
    plan = rematerialize(ours, x, memory_budget=budget, planner="periodic")
    assert plan.rung == "regions"
    assert (plan.num_recomputed > 0) == (budget != "100%")
    assert plan.plain.peak_bytes == pytest.approx(step_peak(plain, x), rel=0.02)
    assert plan.peak_bytes == pytest.approx(step_peak(ours, x), rel=0.01)
    assert step_peak(ours, x) <= plan.budget_bytes
    again = build(kind)
    rematerialize(again, x, plan=Plan.from_json(plan.to_json()))
    assert step_peak(again, x) == pytest.approx(plan.peak_bytes, rel=0.01)
    batches = [x, x[:, :24], x[:20]]
    assert_equal_traces(traces(plain, batches), traces(ours, batches))


@pytest.mark.slow
def test_a_plan_serves_a_step_that_lacks_one_of_its_sizes_and_not_one_that_lacks_a_graph() -> None:
    module, x = build(Halving), data()
    plan = rematerialize(module, x, memory_budget="100%", planner="periodic")
    restore(module)
    calls = look_through(module, lambda: module(x), ["[]"]).calls
    assert plan.step is not None
    plans = plan.step.plans
    several = [name for name in plans if ":" in name]
    assert several
    fewer = [call for call in calls if call.name not in several]
    assert set(programs_of(fewer, plans)) == plans.keys() - set(several)
    with pytest.raises(ValueError, match="which the step does not call"):
        programs_of(calls[1:], plans)
