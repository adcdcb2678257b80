"""No budget is refused before what might meet it was executed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_remat import InfeasibleBudgetError, find_batch_size, restore
from lightning_remat.batch_search.plain_trial import PlainTrial
from lightning_remat.reports.result import Result


@pytest.mark.slow
def test_the_plain_step_is_executed_before_a_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though planned steps need far more than predicted, it may need less."""

    def measure(self: PlainTrial, batch_size: int, *, with_scratch: bool) -> int:
        is_plain = not any("forward" in vars(m) for m in net.modules())
        return int(true_measure(self, batch_size, with_scratch=with_scratch) * (0.9 if is_plain else 2))

    true_measure = PlainTrial.measure
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Sigmoid()) for _ in range(6)))

    def found(budget: str | int) -> Result:
        arguments: dict[str, Any] = {"memory_budget": budget, "batch_size": "keep", "planner": "periodic"}
        result = find_batch_size(net, torch.randn(256, 16), lambda x: net(x).sum(), **arguments)
        restore(net)
        return result

    budget = int(0.95 * found("100%").plain_peak_bytes)
    assert found(budget).step.num_recomputed
    monkeypatch.setattr(PlainTrial, "measure", measure)
    result = found(budget)
    assert not result.step.num_recomputed
    assert (result.measured_peak_bytes or budget + 1) <= budget
    with pytest.raises(InfeasibleBudgetError):
        found(int(0.8 * budget))
