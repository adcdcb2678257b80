"""Calls between which a backward lies are not alive together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from remat_runs import Classifier, run, seeded
from torch import Tensor, nn

from lightning_remat import Rematerialization
from lightning_remat.regions.look_through import look_through
from lightning_remat.regions.phases import Backwards, alive_together

X, LARGER = torch.randn(4, 6), torch.randn(8, 6)


@pytest.mark.parametrize(
    ("calls", "kept"),
    [
        ([(0, "net", X), (0, "net", X)], {0}),
        ([(0, "net", X), (1, "net", X), (2, "net", X)], {2}),
        ([(0, "net", LARGER), (1, "net", X)], {0}),
        ([(0, "net", X), (0, "head", X), (1, "net", X)], {0}),
        ([(0, "net", X), (0, "net", X), (1, "net", LARGER)], {0, 1}),
        ([(0, "generator", X), (0, "critic", X), (1, "critic", X), (1, "critic", X)], {0, 1}),
    ],
    ids=["one", "alike", "smaller", "part", "fewer-and-larger", "gan"],
)
def test_a_phase_stands_for_those_that_call_no_more_on_no_more(calls: Any, kept: set[int]) -> None:
    assert alive_together((phase, what, (x,), {}) for phase, what, x in calls) == kept


class Twice(nn.Module):
    """Calls its network twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh())


def times_called(between: Callable[[Tensor, Tensor, Backwards], object]) -> int:
    module, backwards = Twice(), Backwards()

    def step() -> None:
        x = X.clone().requires_grad_()
        between(module.net(x).sum(), x, backwards)
        module.net(x)

    return len(look_through(module, step, backwards=backwards).calls)


def test_backwards_that_run_and_that_would_run_end_a_phase() -> None:
    assert times_called(lambda loss, x, backwards: None) == 2
    assert times_called(lambda loss, x, backwards: backwards.asked(loss)) == 1
    assert times_called(lambda loss, x, backwards: torch.autograd.grad(loss, x)) == 1
    assert times_called(lambda loss, x, backwards: loss.backward()) == 1


def test_backwards_that_retain_their_graph_do_not() -> None:
    assert times_called(lambda loss, x, backwards: backwards.asked(loss, retain_graph=True)) == 2
    assert times_called(lambda loss, x, backwards: backwards.asked(loss, create_graph=True)) == 2
    assert times_called(lambda loss, x, backwards: torch.autograd.grad(loss, x, create_graph=True)) == 2


class Updating(Classifier):
    """Several updates in a step, as PPO makes."""

    def __init__(self, num_updates: int) -> None:
        super().__init__()
        self.automatic_optimization, self.num_updates = False, num_updates

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(self.num_updates):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*")
def test_several_updates_in_a_step_need_what_one_needs(tmp_path: Path) -> None:
    peaks: list[int] = []
    for num_updates in (1, 4):
        callback = Rematerialization("periodic", memory_budget="80%", batch_size="keep")
        run(tmp_path, seeded(lambda n=num_updates: Updating(n)), callback, max_steps=4)
        assert callback.result is not None
        assert callback.result.step.keys == ("net",)
        peaks.append(callback.result.plain_peak_bytes)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)
