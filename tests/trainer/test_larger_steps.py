"""Steps that need more than the one that was planned for: planned anew, within the budget, as exact as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from remat_runs import Classifier, Peaks, Reader, run, seeded
from torch import Tensor, nn

import lightning_remat.batch_search.search as search
import lightning_remat.trainer.larger_steps as module_under_test
from lightning_remat import Rematerialization
from lightning_remat.batch_search.candidates import Choice
from lightning_remat.batch_search.executed import Executed, execute
from lightning_remat.batch_search.settings import Settings
from lightning_remat.batch_search.trial import Trial
from lightning_remat.trainer.larger_steps import LargerSteps
from lightning_remat.trainer.lightning_step import StepFailedError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]


def trained(
    root: Path, lengths: tuple[int, ...], budget: int | str, *, modules: list[str] | None = None, **options: Any
) -> tuple[Reader, Rematerialization, list[float]]:
    module = seeded(lambda: Reader(*lengths))
    callback = Rematerialization("periodic", memory_budget=budget, batch_size="keep", report_dir=root, modules=modules)
    logger = Peaks()
    run(root, module, callback, logger=logger, max_epochs=1, max_steps=-1, **options)
    return module, callback, logger.peaks


def plain_peak(root: Path, length: int) -> int:
    _, callback, _ = trained(root, (length, length), "100%")
    assert callback.result is not None
    return callback.result.plain_peak_bytes


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}], ids=["each", "accumulated"])
def test_longer_batches_stay_within_the_budget_and_train_as_without(tmp_path: Path, options: dict[str, Any]) -> None:
    lengths = (20, 16, 60, 48, 33, 80, 20, 80)
    budget = plain_peak(tmp_path, max(lengths)) * 3 // 4
    module, callback, peaks = trained(tmp_path, lengths, budget, **options)
    assert len(peaks) >= len(lengths) // 3
    assert max(peaks) <= budget
    assert callback.result is not None
    assert callback.result.budget_bytes == budget
    assert callback.result.plan.num_recomputed > 0
    plain = seeded(lambda: Reader(*lengths))
    run(tmp_path, plain, max_epochs=1, max_steps=-1, **options)
    assert module.steps == plain.steps == len(lengths)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_modules_that_a_list_names_are_planned_anew(tmp_path: Path) -> None:
    budget = plain_peak(tmp_path, 80) * 3 // 4
    _, callback, peaks = trained(tmp_path, (20, 80, 20), budget, modules=["net"])
    assert max(peaks) <= budget
    assert callback.result is not None
    assert callback.result.plan.num_recomputed > 0


def test_batches_that_cannot_need_more_are_not_planned_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LargerSteps, "plan", lambda *_: pytest.fail("planned anew"))
    budget = plain_peak(tmp_path, 80) * 3 // 4
    trained(tmp_path, (80, 20, 80, 79), budget)
    trained(tmp_path, (20, 24, 22, 26), budget)  # within it as they are


def test_a_batch_that_cannot_fit_gets_the_lowest_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[int] = []

    def noted(trial: Trial, choice: Choice, settings: Settings) -> Executed:
        executed.append(choice.step.num_recomputed)
        return execute(trial, choice, settings)

    budget = plain_peak(tmp_path, 30)
    monkeypatch.setattr(search, "execute", noted)
    with pytest.warns(UserWarning, match="needs more than those planned for, and gets the lowest peak: .* needs"):
        module, callback, peaks = trained(tmp_path, (20, 400, 20, 500), budget)
    assert module.steps == 4
    assert callback.result is not None
    assert callback.result.plan.num_recomputed > 0
    assert len(executed) == 3  # the first step, then the leanest before a refusal, and as what is installed
    assert all(executed[1:])  # no plain step of a batch that cannot fit
    assert peaks[1] < plain_peak(tmp_path, 400)


def test_after_some_plans_the_last_one_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "_MOST_PLANS", 1)
    budget = plain_peak(tmp_path, 80) * 3 // 4
    with pytest.warns(UserWarning, match="planned anew 1 times.*Remedy: train on the largest batch first"):
        module, _, _ = trained(tmp_path, (20, 60, 80, 81), budget)
    assert module.steps == 4


def test_a_step_that_cannot_be_tried_goes_on_by_the_plan_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise StepFailedError from ValueError("the user's")

    monkeypatch.setattr(module_under_test, "find", fails)
    rewritten: list[bool] = []

    class Watching(Reader):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            rewritten.append("forward" in vars(self.net))
            return super().training_step(batch, batch_idx)

    callback = Rematerialization("periodic", memory_budget="75%", batch_size="keep")
    with pytest.warns(UserWarning, match="cannot plan anew for a larger batch.*ValueError.*the user's"):
        run(tmp_path, seeded(lambda: Watching(20, 60, 80)), callback, max_epochs=1, max_steps=-1)
    assert rewritten[-2:] == [True, True]


def test_an_error_on_the_way_leaves_the_plan_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(module_under_test, "find", fails)
    module = seeded(lambda: Reader(20, 60))
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, module, Rematerialization("periodic", memory_budget="75%", batch_size="keep"), max_epochs=1)
    assert "forward" not in vars(module.net)


class Unfreezing(Classifier):
    """Trains its head alone at first, then all of it."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.GELU()) for _ in range(8))))
        self.net.requires_grad_(False)
        self.head = nn.Linear(64, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return self.head(self.net(torch.randn(1024, 64))).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.net.requires_grad_(True)


def test_a_network_that_is_unfrozen_stays_within_the_budget(tmp_path: Path) -> None:
    budget, logger = 3 << 20, Peaks()
    callback = Rematerialization(memory_budget=budget, batch_size="keep", report_dir=tmp_path)
    module = seeded(Unfreezing)
    run(tmp_path, module, callback, logger=logger, max_steps=6)
    assert callback.result is not None
    assert callback.result.step.num_recomputed
    assert max(logger.peaks) <= budget
    plain = seeded(Unfreezing)
    run(tmp_path, plain, max_steps=6)
    assert callback.result.plain_peak_bytes > budget > logger.peaks[0]
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Penalized(Classifier):
    """Adds a penalty on gradients from the third step on."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.GELU()) for _ in range(6))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        x = torch.randn(1024, 64, requires_grad=True)
        loss = self.net(x).square().mean()
        if batch_idx < 2:
            return loss
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


def test_a_step_that_does_more_than_the_planned_one_is_told_of_once(tmp_path: Path) -> None:
    callback = Rematerialization("periodic", memory_budget="80%", batch_size="keep")
    with pytest.warns(UserWarning, match="more than the budget of") as caught:
        run(tmp_path, seeded(Penalized), callback, logger=Peaks(), max_steps=5)
    told = [str(w.message) for w in caught if "more than the budget of" in str(w.message)]
    assert len(told) == 1
    assert "did more than the step that was planned" in told[0]
