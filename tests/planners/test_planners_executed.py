"""Every planner's schedules run for real: gradients equal in every bit, and a measured peak within the budget."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torchvision import models
from training_steps import step_peak

from benchmarks.peaks import LOSS_BYTES
from lightning_remat import (
    PLANNERS,
    Graph,
    InfeasibleBudgetError,
    Schedule,
    plan,
    profile,
    rematerialize,
    restore,
    trace,
)
from remat_recipes.networks.lstm import LSTM
from remat_recipes.networks.unet import UNet

pytestmark = pytest.mark.slow

# Sizes at which activations outweigh the parameters, and one step takes a fraction of a second.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "unet": (lambda: UNet(1, 2, width=8), lambda: torch.randn(2, 1, 220, 220)),
    "resnet50": (models.resnet50, lambda: torch.randn(4, 3, 96, 96)),
    "densenet121": (models.densenet121, lambda: torch.randn(2, 3, 64, 64)),
    "googlenet": (lambda: models.googlenet(init_weights=False, aux_logits=False), lambda: torch.randn(4, 3, 64, 64)),
    "lstm": (
        lambda: LSTM(50, 32, 64, num_layers=2, num_steps=6, cell="elementary"),
        lambda: torch.randint(50, (64, 6)),
    ),
}
CHOSEN: dict[str, Callable[..., Schedule]] = {
    **PLANNERS,
    "auto": partial(PLANNERS["auto"], effort=0.1),
    "checkmate": partial(PLANNERS["checkmate"], most_stages=6),
}


@dataclass(frozen=True)
class Step:
    """What a step leaves behind, and how much memory it took."""

    values: dict[str, Tensor]
    peak_bytes: int


@dataclass(frozen=True)
class Plain:
    """A network before any step, its profile, and its plain step."""

    network: nn.Module
    state: dict[str, Tensor]
    batch: Tensor
    graph: Graph
    step: Step


def run_step(network: nn.Module, batch: Tensor) -> Step:
    """Gradients, buffers and random state of one step."""
    torch.manual_seed(7)
    peak_bytes = step_peak(network, batch)
    values = {f"gradient of {name}": p.grad for name, p in network.named_parameters() if p.grad is not None}
    values |= dict(network.named_buffers())
    values["random state"] = torch.get_rng_state()
    return Step(values, peak_bytes)


@cache
def plain(name: str) -> Plain:
    make_network, make_batch = NETWORKS[name]
    torch.manual_seed(0)
    network, batch = make_network(), make_batch()
    graph = profile(trace(network, batch), batch, repeats=1)
    return Plain(network, copy.deepcopy(network.state_dict()), batch, graph, run_step(copy.deepcopy(network), batch))


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_bitwise_equal_and_the_measured_peak_fits(name: str, planner: str) -> None:
    given = plain(name)
    whole = plan(given.graph, 1 << 62, "keep_all").peak_bytes
    with pytest.raises(InfeasibleBudgetError) as error:
        plan(given.graph, 0, CHOSEN[planner])
    floor = int(error.value.minimum_bytes)
    budgets = [whole] if planner == "keep_all" else [floor, (floor + whole) // 2]
    assert floor < whole or planner == "keep_all"
    for budget in budgets:
        made = plan(given.graph, budget, CHOSEN[planner])
        assert (made.num_recomputed > 0) == (planner != "keep_all")
        network = given.network  # the same one, as capturing it takes longer than the steps
        network.load_state_dict(given.state)
        network.zero_grad()
        rematerialize(network, given.batch, plan=made)
        ours = run_step(network, given.batch)
        restore(network)
        assert ours.values.keys() == given.step.values.keys()
        different = [k for k, value in ours.values.items() if not torch.equal(value, given.step.values[k])]
        assert not different, different[:5]
        assert ours.peak_bytes - LOSS_BYTES <= budget
