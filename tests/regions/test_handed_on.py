"""What the calls of a step hand on to each other counts for as long as it lives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from remat_runs import Classifier, run, seeded
from torch import Tensor, nn

from lightning_remat import Plan, Rematerialization, find_batch_size, rematerialize
from lightning_remat.reports.result import Result

ROWS, WIDTH = 256, 16
SIZE = 4 * ROWS * WIDTH
"""Bytes of an activation between blocks."""


class Block(nn.Module):
    """Saves neither what comes into it nor what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.scale
        for _ in range(6):
            y = (y + 0.1).exp()
        return y + 1.0


class Whole(nn.Module):
    """A forward that TorchDynamo leaves alone, with blocks that it does not."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(self.between(x))
        return x


class Passing(Whole):
    """What comes into a block nothing saves."""

    def between(self, x: Tensor) -> Tensor:
        return x * 0.01


class Saving(Whole):
    """What comes into a block the code before it saves, what the block returns nothing."""

    def between(self, x: Tensor) -> Tensor:
        return (x * 0.01).tanh()


class Skipping(Whole):
    """What the first blocks return is read by the last ones, too."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            x = block(x * 0.01)
            kept.append(x)
        for block in self.blocks[half:]:
            x = block(x * 0.01 + kept.pop() * 0.01)
        return x


class Detached(Whole):
    """No backward comes to the first block, nor to the second, which goes on from there."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        first, second, *others = self.blocks
        target = second(first(x * 0.01) * 0.01).detach()
        for block in others:
            x = block(x * 0.01)
        return x - target


def planned(kind: type[Whole], budget: str) -> Plan:
    torch.manual_seed(0)
    return rematerialize(kind(), torch.randn(ROWS, WIDTH), memory_budget=budget, planner="periodic")


@pytest.mark.parametrize("kind", [Passing, Saving, Skipping])
@pytest.mark.parametrize("budget", [80, *(pytest.param(budget, marks=pytest.mark.slow) for budget in (70, 90))])
def test_a_planned_step_needs_what_is_predicted(kind: type[Whole], budget: int) -> None:
    made = planned(kind, f"{budget}%")
    assert made.num_recomputed
    step: Any = made.step
    # But for numbers and their gradients.
    assert abs(step.plain_correction_bytes) < 100
    assert abs(step.surroundings.correction_bytes) < 100


@pytest.mark.parametrize("budget", ["75%", "90%"])
def test_what_is_detached_is_held_no_longer(budget: str) -> None:
    made = planned(Detached, budget)
    assert made.num_recomputed
    assert made.step is not None
    around = made.step.surroundings
    assert around.over == (0, 1)
    assert around.order == (0, 1, ~1, ~0, 2, 3, ~3, ~2)
    # The two hold what six operations of each save until then; the result that is detached lives on.
    assert abs(around.correction_bytes) <= SIZE
    assert made.step.timeline.num_forward > len(made.step.timeline.memory_bytes) // 2
    assert Plan.from_json(made.to_json()) == made


def test_what_one_call_returns_is_told_once() -> None:
    torch.manual_seed(0)
    made = rematerialize(Passing(1), torch.randn(ROWS, WIDTH), memory_budget="80%", planner="periodic")
    assert made.step is not None
    # Its input is told beside, its result is in the figures of its region until its backward, where there is another.
    assert made.step.surroundings.handed_on.during_bytes == (0, 0)
    assert abs(made.step.surroundings.correction_bytes) < 100


def test_it_is_told_what_nothing_saves() -> None:
    passing = planned(Passing, "75%").step
    saving = planned(Saving, "75%").step
    assert passing is not None
    assert saving is not None
    assert passing.surroundings.handed_on.passing_bytes == (SIZE,) * 4
    # What is made of the batch has no gradient, for which something would be saved.
    assert saving.surroundings.handed_on.passing_bytes == (SIZE, 0, 0, 0)
    assert max(saving.surroundings.handed_on.during_bytes) > 0


def test_a_stored_plan_knows_it() -> None:
    made = planned(Passing, "75%")
    assert Plan.from_json(made.to_json()) == made


class Following(nn.Module):
    """A network and the target that it follows."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.target = (
            nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Sigmoid()))) for _ in range(2)
        )

    def loss(self, x: Tensor) -> Tensor:
        target = self.target(x).detach()
        return (self.net(x) - target).square().mean()


class FollowingInTrainer(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = Following()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net.loss(torch.randn(256, 32))


def in_trainer(path: Path) -> Result:
    callback = Rematerialization("periodic", memory_budget="90%", batch_size="keep")
    run(path, seeded(FollowingInTrainer), callback, max_steps=1)
    assert callback.result is not None
    return callback.result


def by_hand(path: Path) -> Result:
    module = seeded(Following)
    arguments: dict[str, Any] = {"planner": "periodic", "memory_budget": "90%", "batch_size": "keep"}
    return find_batch_size(module, torch.randn(256, 32), module.loss, **arguments)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*")
@pytest.mark.parametrize("search", [in_trainer, by_hand])
def test_a_step_with_a_target_is_predicted(search: Callable[[Path], Result], tmp_path: Path) -> None:
    result = search(tmp_path)
    assert result.step.num_recomputed
    assert result.step.surroundings.over == (0,)
    assert result.measured_peak_bytes is not None
    assert result.measured_peak_bytes == pytest.approx(result.step.predicted_peak_bytes, rel=0.02)
