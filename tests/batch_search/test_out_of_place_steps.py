"""Where a whole training step does not fit otherwise, its regions run in-place activations out of place."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from remat_runs import Classifier, run, seeded
from small_vgg import small_vgg
from torch import Tensor, nn
from training_steps import assert_equal_traces, step_peak, traces

from benchmarks.peaks import LOSS_BYTES
from lightning_remat import (
    PLANNERS,
    InfeasibleBudgetError,
    Plan,
    Rematerialization,
    find_batch_size,
    rematerialize,
    restore,
    trace,
)
from lightning_remat.batch_search.candidates import CandidateSearch
from lightning_remat.batch_search.trial import StepModel
from lightning_remat.execution.rewriter import current_plan

QUICK = partial(PLANNERS["auto"], effort=0.02)

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]


def small_convolutions() -> nn.Sequential:
    """Of which each kernel takes more than what could go earlier out of place."""
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(inplace=True)) for _ in range(4)))


def classifier() -> nn.Sequential:
    return nn.Sequential(*small_vgg(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(16 * 4 * 4, 5))


class TwoParts(nn.Module):
    """Decides on a value between its parts, so that it is two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = small_vgg(), small_vgg(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x * 0.5 if x.sum() == torch.inf else x)


def is_apart(plan: Plan, module: nn.Module, x: Tensor) -> bool:
    return len(plan.graph.nodes) > len(trace(module, x).operations)


def lowest(module: nn.Module, batch: Tensor) -> int:
    with pytest.raises(InfeasibleBudgetError) as error:
        find_batch_size(module, batch, lambda x: module(x).sum(), planner=QUICK, memory_budget=1, batch_size="keep")
    return int(error.value.minimum_bytes)


def fused_lowest(module: nn.Module, batch: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """What it would be if nothing ran out of place."""
    with monkeypatch.context() as patch:
        patch.setattr("lightning_remat.batch_search.search.with_apart", lambda _trial, model, **_options: model)
        return lowest(module, batch)


@pytest.mark.slow
def test_a_step_goes_below_the_floor_of_its_fused_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, batch = classifier(), torch.randn(16, 3, 16, 16)
    plain = copy.deepcopy(module)
    budget, fused = lowest(module, batch), fused_lowest(module, batch, monkeypatch)
    assert 1.02 * budget < fused
    assert "forward" not in vars(module)

    def loss_of(x: Tensor) -> Tensor:
        return module(x).sum()

    fitting = find_batch_size(module, batch, loss_of, planner=QUICK, memory_budget="1GiB", batch_size="keep")
    assert fitting.step.num_recomputed == 0
    found = find_batch_size(module, batch, loss_of, planner=QUICK, memory_budget=int(1.02 * budget), batch_size="keep")
    assert found.measured_peak_bytes is not None
    assert found.measured_peak_bytes <= found.budget_bytes < fused
    assert is_apart(found.plan, plain, batch)
    # The plain step is that of the module as it is.
    assert found.step.plain_timeline.memory_bytes == fitting.step.plain_timeline.memory_bytes
    assert found.plan.plain.peak_bytes == fitting.plan.plain.peak_bytes
    assert all(m.inplace for m in module.modules() if isinstance(m, nn.ReLU))
    assert_equal_traces(traces(plain, [batch] * 2), traces(module, [batch] * 2))


@pytest.mark.slow
def test_a_size_is_found_where_not_even_the_smallest_would_fit_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, batch = classifier(), torch.randn(16, 3, 16, 16)
    one = fused_lowest(module, batch, monkeypatch)
    found = find_batch_size(
        module,
        batch,
        lambda x: module(x).sum(),
        planner=QUICK,
        memory_budget=int(0.98 * one),
        min_batch_size=16,
        max_batch_size=64,
    )
    assert 16 <= found.batch_size < 24
    assert is_apart(found.plan, module, batch)
    assert found.measured_peak_bytes is not None
    assert found.measured_peak_bytes <= found.budget_bytes


@pytest.mark.slow
def test_a_larger_size_is_found_out_of_place(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, batch = classifier(), torch.randn(16, 3, 16, 16)
    budget = fused_lowest(module, batch, monkeypatch)
    plain = copy.deepcopy(module)

    def loss_of(x: Tensor) -> Tensor:
        return module(x).sum()

    found = find_batch_size(module, batch, loss_of, planner=QUICK, memory_budget=budget, max_batch_size=64)
    assert found.measured_peak_bytes is not None
    assert found.measured_peak_bytes <= budget
    assert is_apart(found.plan, plain, batch)
    assert_equal_traces(traces(plain, [batch] * 2), traces(module, [batch] * 2))
    restore(module)
    with monkeypatch.context() as patch:
        patch.setattr("lightning_remat.batch_search.search.with_apart", lambda _trial, model, **_options: model)
        fused = find_batch_size(module, batch, loss_of, planner=QUICK, memory_budget=budget, max_batch_size=64)
    assert fused.batch_size < found.batch_size
    assert not is_apart(fused.plan, plain, batch)


@pytest.mark.slow
def test_no_size_is_lost_where_nothing_is_gained_out_of_place(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, batch = nn.Sequential(*small_convolutions(), nn.Flatten()), torch.randn(16, 3, 16, 16)
    budget = fused_lowest(module, batch, monkeypatch)
    monkeypatch.setattr("lightning_remat.batch_search.search._NOTICEABLY", 2.0)
    search = CandidateSearch.exchange
    exchanged: list[bool] = []

    def watched(self: CandidateSearch, model: StepModel) -> None:
        exchanged.append(model.apart is not None)
        search(self, model)

    monkeypatch.setattr(CandidateSearch, "exchange", watched)
    found = find_batch_size(
        module, batch, lambda x: module(x).sum(), planner="keep_all", memory_budget=2 * budget, max_batch_size=64
    )
    assert exchanged == [True, False]
    assert found.step.num_recomputed == 0
    assert not is_apart(found.plan, module, batch)


def remat(**options: Any) -> Rematerialization:
    return Rematerialization(QUICK, batch_size="keep", **options)


def train(root: Path, callback: Rematerialization | None, **options: Any) -> Classifier:
    module = seeded(Classifier, net=seeded(classifier), batch_size=32)
    run(root, module, *([] if callback is None else [callback]), **options)
    return module


def lowest_in_trainer(root: Path) -> int:
    with pytest.raises(InfeasibleBudgetError) as error:
        train(root, remat(memory_budget=1))
    return int(error.value.minimum_bytes)


@pytest.mark.slow
def test_the_callback_trains_below_that_floor_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least = lowest_in_trainer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("lightning_remat.batch_search.search.with_apart", lambda _trial, model, **_options: model)
        assert least < 0.95 * lowest_in_trainer(tmp_path)
    path = tmp_path / "plan.json"
    plain, first = train(tmp_path, None), remat(memory_budget=int(1.02 * least), plan_path=str(path))
    planned = train(tmp_path, first)
    assert first.result is not None
    assert first.result.measured_peak_bytes is not None
    assert first.result.measured_peak_bytes <= first.result.budget_bytes
    again = remat(memory_budget=int(1.02 * least), plan_path=str(path))
    resumed = train(tmp_path, again)
    assert again.result is not None
    assert again.result.step == first.result.step
    for ours in (planned, resumed):
        assert all(torch.equal(v, plain.state_dict()[k]) for k, v in ours.state_dict().items())


@pytest.mark.slow
def test_the_lowest_peak_is_that_of_the_better_way(tmp_path: Path) -> None:
    least = lowest_in_trainer(tmp_path)
    callback = remat(memory_budget=1, on_infeasible="minimum")
    with pytest.warns(UserWarning, match="plans the lowest peak instead"):
        train(tmp_path, callback)
    assert callback.result is not None
    assert callback.result.predicted_peak_bytes <= 1.02 * least


@pytest.mark.slow
def test_parts_of_a_module_run_out_of_place_and_their_plan_is_read_back() -> None:
    torch.manual_seed(0)
    plain, x = TwoParts(), torch.randn(16, 3, 16, 16)
    ours = copy.deepcopy(plain)
    with pytest.raises(InfeasibleBudgetError) as error:
        rematerialize(ours, x, memory_budget=1, planner=QUICK)
    assert current_plan(ours) is None
    made = rematerialize(ours, x, memory_budget=int(error.value.minimum_bytes), planner=QUICK)
    assert made.step is not None
    assert list(made.step.plans) == ["[0]", "[1]"]
    kinds = [[node.kind for node in part.graph.nodes] for part in made.step.plans.values()]
    assert kinds[0][-2:] == ["sum", "eq"]  # what is decided on belongs to the graph before
    assert any("relu" in part for part in kinds)
    assert made.plain.peak_bytes == pytest.approx(step_peak(plain, x) - LOSS_BYTES, rel=0.02)
    assert step_peak(ours, x) - LOSS_BYTES <= error.value.minimum_bytes
    assert_equal_traces(traces(plain, [x] * 2), traces(ours, [x] * 2))
    restore(ours)
    read = Plan.from_json(made.to_json())
    assert read.step == made.step
    rematerialize(ours, x, plan=read)
    assert_equal_traces(traces(plain, [x] * 2), traces(ours, [x] * 2))
