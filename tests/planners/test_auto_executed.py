"""Plans of `auto` over 20 budgets, executed: the measured peak is within each, and more budget is never slower."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.peaks import LOSS_BYTES, measured_peak
from lightning_remat import InfeasibleBudgetError, plan, profile, rematerialize, restore, trace
from remat_recipes.networks.lstm import LSTM
from remat_recipes.networks.unet import UNet

SMALL = 0.02  # effort
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "unet": (lambda: UNet(1, 3, width=4), lambda: torch.randn(2, 1, 188, 204)),
    "lstm": (lambda: LSTM(7, 3, 5, num_layers=2, num_steps=4), lambda: torch.randint(7, (64, 4))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_measured_peaks_are_within_twenty_budgets(name: str) -> None:
    make, inputs = CASES[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        module, x = make(), inputs()
        graph = profile(trace(module, x), x)
        most = plan(graph, 1 << 62, "keep_all").peak_bytes
        with pytest.raises(InfeasibleBudgetError) as below:
            plan(graph, -1, effort=SMALL)
        least = int(below.value.minimum_bytes)
        assert least < 0.9 * most
        slowest = float("inf")
        for k in range(20):
            budget = least + (most - least) * k // 19
            found = plan(graph, budget, effort=SMALL)
            assert found.simulation.seconds <= slowest
            slowest = found.simulation.seconds
            rematerialize(module, x, plan=found)
            assert measured_peak(module, x) - LOSS_BYTES <= budget
            restore(module)
    assert slowest == found.plain.seconds
