"""What a part does for the first time while it trains is planned by the planner that was asked for, in its budget."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from training_steps import step_peak

from benchmarks.peaks import LOSS_BYTES
from lightning_remat import PLANNERS, Graph, Schedule, rematerialize


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.is_on = False
        self.layers = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Sigmoid())))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.tanh() if self.is_on else x)


class Divided(nn.Module):
    """Parts around what cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Switched(), Switched()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(h * torch._dynamo.disable(lambda: 1.0)())


@pytest.mark.slow
def test_the_users_planner_plans_what_a_part_does_later() -> None:
    planned: list[Graph] = []

    def planner(graph: Graph, budget_bytes: int, **options: object) -> Schedule:
        planned.append(graph)
        return PLANNERS["periodic"](graph, budget_bytes)

    module, x = Divided(), torch.randn(256, 32)
    plan = rematerialize(module, x, memory_budget="70%", planner=planner)
    assert plan.rung == "regions"
    planned.clear()
    module(x).sum().backward()
    assert not planned
    module.first.is_on = True
    module(x).sum().backward()
    assert planned


@pytest.mark.slow
def test_parts_that_all_do_something_new_stay_within_the_budget_together() -> None:
    module, x = Divided(), torch.randn(512, 32)
    plan = rematerialize(module, x, memory_budget="60%")
    assert step_peak(module, x) - LOSS_BYTES <= plan.budget_bytes
    module.first.is_on = module.second.is_on = True
    module(x).sum().backward()
    assert step_peak(module, x) - LOSS_BYTES <= plan.budget_bytes
