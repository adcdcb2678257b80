"""What the executor asks for recomputations beside their kernels is in what is predicted of a plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_remat import Plan, rematerialize
from lightning_remat.execution.rerun_prices import rerun_prices
from lightning_remat.execution.rewriter import programs_in


def test_recomputations_and_their_stretches_cost_something() -> None:
    prices = rerun_prices()
    assert all(price >= 0 for price in prices)
    assert sum(prices) > 0
    assert rerun_prices() is prices, "measured once"


def test_a_plan_knows_them() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(8)))
    plan = rematerialize(module, torch.randn(512, 8), memory_budget="70%", planner="periodic")
    run, stretch, hook = rerun_prices()
    seen: set[int] = set()
    runs = stretches = 0
    is_running_again = False
    for kind, n in plan.schedule:
        if kind in "FB":
            is_again = kind == "F" and n in seen
            runs, stretches = runs + is_again, stretches + (is_again and not is_running_again)
            is_running_again = is_again
            seen.add(n)
    own = sum(plan.graph.nodes[n].forward_seconds for n in _again(plan))
    (program,) = programs_in(module)
    assert stretches
    assert program.hooked
    prices = runs * run + stretches * stretch + len(program.hooked) * hook
    assert plan.simulation.recompute_seconds == pytest.approx(own + prices)


def _again(plan: Plan) -> list[int]:
    runs = [n for kind, n in plan.schedule if kind == "F"]
    return [n for k, n in enumerate(runs) if n in runs[:k]]
