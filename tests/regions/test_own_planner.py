"""What a part does for the first time while it trains is planned by the planner that was asked for, in its budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from remat_runs import Classifier, run, seeded
from torch import Tensor, nn
from training_steps import step_peak

from benchmarks.peaks import LOSS_BYTES
from lightning_remat import PLANNERS, Graph, Rematerialization, Schedule, find_batch_size, rematerialize


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


class Twice(Switched):
    """Runs its layers twice when it is on."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers(x) * 2
        return self.layers(h.tanh()) if self.is_on else h


class Growing(Classifier):
    """Its network does more from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Twice()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.net.is_on = batch_idx > 1
        return self.net(torch.randn(256, 32)).sum()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*")
@pytest.mark.filterwarnings("ignore:a training step needed")  # the one in which it is planned anew
def test_the_users_planner_plans_what_comes_later_in_training_too(tmp_path: Path) -> None:
    kinds: list[set[str]] = []

    def planner(graph: Graph, budget_bytes: int, **options: object) -> Schedule:
        kinds.append({node.kind for node in graph.nodes})
        return PLANNERS["periodic"](graph, budget_bytes)

    run(tmp_path, seeded(Growing), Rematerialization(planner, memory_budget="85%", batch_size="keep"), max_steps=2)
    assert all("tanh" not in found for found in kinds)
    run(tmp_path, seeded(Growing), Rematerialization(planner, memory_budget="85%", batch_size="keep"), max_steps=4)
    assert any("tanh" in found for found in kinds)


@pytest.mark.slow
def test_parts_that_all_do_something_new_stay_within_the_budget_together() -> None:
    module, x = Divided(), torch.randn(512, 32)
    plan = rematerialize(module, x, memory_budget="60%")
    assert step_peak(module, x) - LOSS_BYTES <= plan.budget_bytes
    module.first.is_on = module.second.is_on = True
    module(x).sum().backward()
    assert step_peak(module, x) - LOSS_BYTES <= plan.budget_bytes


@dataclass
class Planned:
    """A planner that is an object, and as a dataclass has no hash."""

    name: str

    def __call__(self, graph: Graph, budget_bytes: int, **options: object) -> Schedule:
        return PLANNERS[self.name](graph, budget_bytes)


@pytest.mark.slow
def test_a_planner_without_a_hash_plans_parts_too() -> None:
    plan = rematerialize(Divided(), torch.randn(256, 32), memory_budget="90%", planner=Planned("periodic"))
    assert plan.rung == "regions"
    assert plan.num_recomputed


class Scaled(nn.Module):
    """Takes an array of numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Sigmoid(), nn.Tanh())

    def forward(self, x: Tensor, scale: np.ndarray[Any, Any]) -> Tensor:
        return self.layers(x) * float(scale[0])


@pytest.mark.slow
def test_a_part_is_called_twice_with_arrays_of_numpy() -> None:
    module, x = Scaled(), torch.randn(256, 32)

    def loss(batch: Tensor) -> Tensor:
        return module(module(batch, np.ones(3)), np.arange(1.0, 4.0)).sum()

    found = find_batch_size(module, x, loss, planner="periodic", memory_budget="90%", batch_size="keep")
    assert found.measured_peak_bytes <= found.budget_bytes
