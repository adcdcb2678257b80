"""A plan is installed for inputs of the types and sizes that it was made for, and refused for others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_remat import Plan, plan, profile, rematerialize, restore, trace

IMAGES = torch.randn(4, 3, 16, 16)


def network() -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Sigmoid()) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers)


class InParts(nn.Module):
    """A forward that decides on a value, around a part that is one graph."""

    def __init__(self, name: str = "net") -> None:
        super().__init__()
        self.add_module(name, network())

    def forward(self, x: Tensor) -> Tensor:
        (part,) = self.children()
        return part(x) if float(x.detach().sum()) < 1e9 else x


class Aside(InParts):
    """Only the part can be captured."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def planned(module: nn.Module, x: Tensor = IMAGES) -> Plan:
    found = rematerialize(module, x, memory_budget="85%", planner="periodic")
    restore(module)
    return Plan.from_json(found.to_json())


@pytest.mark.slow
@pytest.mark.parametrize("make", [network, InParts, Aside])
@pytest.mark.parametrize(
    ("other", "told"),
    [
        (torch.randn(4, 3, 64, 64), "float32 4×3×64×64"),
        (torch.randn(16, 3, 16, 16), "float32 16×3×16×16"),
    ],
    ids=["image size", "batch size"],
)
def test_a_plan_for_other_sizes_is_refused_by_both_names(make: Any, other: Tensor, told: str) -> None:
    made, module = planned(make()), make()
    assert rematerialize(module, IMAGES, plan=made) is made
    with pytest.raises(ValueError, match=f"made for inputs float32 4×3×16×16 and is given {told}"):
        rematerialize(module, other, plan=made)
    restore(module)


@pytest.mark.slow
def test_a_plan_for_another_type_is_refused() -> None:
    made = planned(network())
    with pytest.raises(ValueError, match="made for inputs float32 4×3×16×16 and is given float64 4×3×16×16"):
        rematerialize(network().double(), IMAGES.double(), plan=made)


def test_a_plan_for_a_wider_module_is_refused() -> None:
    def mlp(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(32, width), nn.Sigmoid(), nn.Linear(width, 32), nn.Sigmoid())

    x = torch.randn(64, 32)
    made = plan(profile(trace(mlp(64), x), x), 1 << 40, "keep_all")
    with pytest.raises(
        ValueError, match=r"made for 16\.38 KiB of parameters and buffers and Sequential has 65\.12 KiB"
    ):
        rematerialize(mlp(256), x, plan=made)


@pytest.mark.slow
def test_a_plan_of_parts_for_a_module_without_them_is_refused() -> None:
    made = planned(Aside())
    with pytest.raises(ValueError, match="the plan is for a module with a part 'net', which Aside has not"):
        rematerialize(Aside("body"), IMAGES, plan=made)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"planner": 5}, "planner is 5, expected a name of PLANNERS or a function"),
        ({"planner": "best"}, "unknown planner 'best'; the planners are auto"),
        ({"memory_budget": "much"}, "memory_budget is 'much'"),
        ({"memory_budget": [1]}, r"memory_budget is \[1\]"),
        ({"memory_budget": np.int64(-3)}, "memory_budget is -3"),
        ({"memory_budget": np.bool_(True)}, "memory_budget is"),
        ({"plan": "plan.json"}, "plan is 'plan.json', expected a Plan"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_runs(arguments: dict[str, Any], message: str) -> None:
    class Untouched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("it ran")

    with pytest.raises(ValueError, match=message):
        rematerialize(Untouched(), IMAGES, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [np.int64, np.uint32, np.float64])
def test_numbers_of_numpy_are_budgets(kind: Any) -> None:
    graph = profile(trace(network(), IMAGES), IMAGES)
    budget = plan(graph, 1 << 40, "keep_all").peak_bytes
    made = plan(graph, kind(budget), "periodic")
    assert made.schedule == plan(graph, budget, "periodic").schedule
    assert Plan.from_json(made.to_json()) == made
    if kind is not np.float64:  # which is a part of the device's memory
        whole = rematerialize(network(), IMAGES, memory_budget=kind(budget), planner="periodic")
        assert (type(whole.budget_bytes), whole.budget_bytes) == (int, budget)


def test_no_number_is_no_budget() -> None:
    graph = profile(trace(network(), IMAGES), IMAGES)
    for budget in ("8GiB", None, float("nan"), True):
        with pytest.raises(ValueError, match="budget_bytes is"):
            plan(graph, budget, "periodic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="planner is 5"):
        plan(graph, 1 << 40, 5)  # type: ignore[arg-type]
