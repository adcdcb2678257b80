"""Every rank of a search asks the others the same questions in the same order, whatever it measured itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from remat_runs import run, seeded
from test_out_of_place_steps import QUICK, classifier, fused_lowest
from torch import Tensor, nn

from lightning_remat import InfeasibleBudgetError, Rematerialization
from lightning_remat.batch_search.plain_trial import PlainTrial
from lightning_remat.batch_search.search import find
from lightning_remat.batch_search.settings import Settings
from lightning_remat.batch_search.trial import with_apart
from lightning_remat.execution.rewriter import current_plan
from lightning_remat.regions.self_check import Compared
from lightning_remat.reports.result import Result

T = TypeVar("T")
Exchange = tuple[str, Any, Exception | None]
"""The kind of question, rank 0's answer and its error."""

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]


class FirstRank(PlainTrial):
    """Writes down what it tells the others."""

    exchanged: list[Exchange]

    def share(self, compute: Callable[[], T]) -> T:
        try:
            value = compute()
        except InfeasibleBudgetError as error:
            self.exchanged.append(("share", None, error))
            raise
        self.exchanged.append(("share", copy.deepcopy(value), None))
        return value

    def least(self, value: int) -> int:
        self.exchanged.append(("least", value, None))
        return value


class OtherRank(PlainTrial):
    """Hears what rank 0 told, and never computes what rank 0 answers for all."""

    exchanged: list[Exchange]

    def share(self, compute: Callable[[], T]) -> T:
        return self._hear("share")

    def least(self, value: int) -> int:
        return self._hear("least")

    def _hear(self, asked: str) -> Any:
        assert self.exchanged, f"this rank waits for an answer ({asked}) that rank 0 does not give"
        kind, value, error = self.exchanged.pop(0)
        assert kind == asked, "this rank waits for another answer than rank 0 gives"
        if error is not None:
            raise error
        return value


def trial_of(kind: type[FirstRank | OtherRank], module: nn.Module, exchanged: list[Exchange]) -> Any:
    def loss_of(x: Tensor) -> Tensor:
        return module(x).sum()

    batch = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    trial = kind(module, batch, loss_of, [], nullcontext, torch.autograd.backward, None, False)
    trial.exchanged = exchanged
    return trial


def check(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, *, sees_lower_floor: bool, lowest: bool = False
) -> tuple[Result, Result]:
    """What both ranks find, whether or not the second sees a lower floor out of place than in place."""
    torch.manual_seed(0)
    module, exchanged = classifier(), list[Exchange]()
    other = copy.deepcopy(module)
    ours, _ = find(trial_of(FirstRank, module, exchanged), settings, lowest=lowest)
    with monkeypatch.context() as patch:
        patch.setattr("lightning_remat.batch_search.search._has_lower_floor", lambda *_: sees_lower_floor)
        theirs, _ = find(trial_of(OtherRank, other, exchanged), settings, lowest=lowest)
    assert not exchanged, "rank 0 gives answers that this rank does not wait for"
    mine, its = current_plan(module), current_plan(other)
    assert mine is not None
    assert its is not None
    assert its.schedule == mine.schedule
    return ours, theirs


@pytest.mark.slow
def test_where_a_larger_size_is_looked_for_out_of_place(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = classifier(), torch.randn(16, 3, 16, 16)
    budget = fused_lowest(module, batch, monkeypatch)
    asked: list[bool] = []

    def watched(*args: Any, **options: Any) -> Any:
        asked.append(True)
        return with_apart(*args, **options)

    monkeypatch.setattr("lightning_remat.batch_search.search.with_apart", watched)
    settings = Settings(planner=QUICK, memory_budget=budget, max_batch_size=64)
    ours, theirs = check(settings, monkeypatch, sees_lower_floor=False)
    assert len(asked) == 2
    assert theirs.batch_size == ours.batch_size
    assert theirs.measured_peak_bytes == ours.measured_peak_bytes


@pytest.mark.slow
def test_where_nothing_fits_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = classifier(), torch.randn(16, 3, 16, 16)
    budget = int(0.98 * fused_lowest(module, batch, monkeypatch))
    settings = Settings(planner=QUICK, memory_budget=budget, batch_size="keep")
    ours, theirs = check(settings, monkeypatch, sees_lower_floor=False)
    assert theirs.plan.schedule == ours.plan.schedule


@pytest.mark.slow
def test_where_the_lowest_peak_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(planner=QUICK, memory_budget=1, min_batch_size=16, max_batch_size=64)
    ours, theirs = check(settings, monkeypatch, sees_lower_floor=True, lowest=True)
    assert theirs.batch_size == ours.batch_size == 16
    assert theirs.measured_peak_bytes == ours.measured_peak_bytes


def remat(**options: Any) -> Rematerialization:
    return Rematerialization("periodic", memory_budget="85%", batch_size="keep", **options)


@pytest.mark.slow
def test_a_stored_plan_that_only_the_first_rank_has_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = remat(), remat(plan_path=tmp_path / "absent.json")
    run(tmp_path, seeded(), first, max_steps=1)
    answers: list[Any] = [first.result, None]  # the plan that rank 0 has read, and that nothing speaks against it
    monkeypatch.setattr("lightning_remat.trainer.ranks.share", lambda *_: answers.pop(0))
    monkeypatch.setattr("lightning_remat.trainer.planning.find", lambda *_: pytest.fail("searched, alone of all ranks"))
    run(tmp_path, seeded(), other, max_steps=1)
    assert first.result is not None
    assert other.result is not None
    assert other.result.plan.schedule == first.result.plan.schedule
    assert not answers


@pytest.mark.slow
def test_where_another_rank_differs_in_its_self_check_no_rank_keeps_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback, module = remat(self_check=True), seeded()
    monkeypatch.setattr("lightning_remat.trainer.step_check.compared", lambda *_, **__: Compared(True, differs=True))
    with pytest.warns(UserWarning, match="leaves the model as it is: another rank's results differ"):
        run(tmp_path, module, callback, max_steps=1)
    assert callback.result is None
    assert current_plan(module) is None
    assert current_plan(module.net) is None
