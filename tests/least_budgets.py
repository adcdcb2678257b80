"""Plans at the least budget that a module has."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_remat import InfeasibleBudgetError, Plan, rematerialize


def rematerialized(module: nn.Module, *args: Any, budget: int) -> Plan:
    return rematerialize(module, *args, memory_budget=budget, planner="periodic")


def least_budget(module: nn.Module, *args: Any) -> int:
    with pytest.raises(InfeasibleBudgetError) as caught:
        rematerialized(module, *args, budget=1)
    return int(caught.value.minimum_bytes)
