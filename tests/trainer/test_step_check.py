"""The callback compares steps with plain ones before it trains: what it finds, what it leaves alone, what it costs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from diary import Diary
from lightning.pytorch import seed_everything
from remat_runs import run
from same_runs import BATCH, WIDTH, Deep, assert_same_run, remat
from torch import Tensor, nn
from torch._dynamo.utils import counters
from untimed_planner import untimed

from lightning_remat.execution.learning import Learning
from lightning_remat.execution.places import Places
from lightning_remat.execution.rewriter import programs_in
from lightning_remat.measure.device_memory import DeviceMemory
from lightning_remat.trainer import step_check
from lightning_remat.trainer.lightning_step import LightningTrial

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]


Step = tuple[int, int, int, int]
"""Samples, epoch, optimizer step, number of the batch."""

RUN = Diary[Step]()
"""Every step that was run."""


class Watching(Deep):
    """Notes its steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        RUN.add((len(batch[0]), self.current_epoch, self.global_step, batch_idx))
        return super().training_step(batch, batch_idx)

    @property
    def is_rewritten(self) -> bool:
        return "forward" in vars(self.net)


class Wrong(Watching):
    """Is something else when it is rewritten and as a test says."""

    def is_wrong(self, batch: Any, batch_idx: int) -> bool:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        factor = 2.0 if self.is_rewritten and self.is_wrong(batch, batch_idx) else 1.0
        return factor * super().training_step(batch, batch_idx)


class AtOnce(Wrong):
    def is_wrong(self, batch: Any, batch_idx: int) -> bool:
        return True


class OfNextBatch(Wrong):
    def is_wrong(self, batch: Any, batch_idx: int) -> bool:
        return batch_idx > 0


class OfNextStep(Wrong):
    def is_wrong(self, batch: Any, batch_idx: int) -> bool:
        return self.global_step > 0


class OfNextEpoch(Wrong):
    def is_wrong(self, batch: Any, batch_idx: int) -> bool:
        return self.current_epoch > 0


def compared(factory: type[Watching], tmp_path: Path, **options: Any) -> tuple[list[Step], Any]:
    """The steps that were run to be compared, and the callback."""
    seed_everything(3, verbose=False)
    callback, module = remat(**options), factory()
    steps: list[Step] = []

    def outcome(*args: Any) -> Any:
        RUN.read()
        try:
            return original(*args)
        finally:
            steps.extend(RUN.read())

    original = step_check.outcome
    RUN.read()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_check, "outcome", outcome)
        run(tmp_path, module, callback, max_steps=1)
    assert RUN.read()[-1] == (BATCH, 0, 0, 0)
    assert not module.is_rewritten
    return steps, callback


@pytest.mark.slow
def test_several_steps_are_compared_on_a_slice_as_they_come_later_too(tmp_path: Path) -> None:
    steps, callback = compared(Watching, tmp_path)
    assert callback.result.step.num_recomputed
    each = [(4, 0, 0, 0), (4, 0, 1, 1), (4, 1, 100, 100)]
    assert steps[:6] == [step for step in each for _ in range(2)]  # planned and plain
    assert steps[6:] == [(4, 0, 0, 0)]  # in eval mode nothing runs by the plan, so that there is nothing to compare


@pytest.mark.slow
@pytest.mark.parametrize(("options", "is_planned"), [({"self_check": False}, True), ({"memory_budget": "1GiB"}, False)])
def test_nothing_is_compared_by_the_flag_or_without_need(
    tmp_path: Path, options: dict[str, Any], is_planned: bool
) -> None:
    steps, callback = compared(Watching, tmp_path, **options)
    assert bool(callback.result.step.num_recomputed) == is_planned
    assert not steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "when"),
    [
        (AtOnce, "a planned step differs"),
        (OfNextBatch, "a planned step later in the epoch differs"),
        (OfNextStep, "a planned step later in the epoch differs"),
        (OfNextEpoch, "a planned step of the next epoch differs"),
    ],
)
def test_a_difference_is_told_once_and_the_plain_model_trained(tmp_path: Path, factory: Any, when: str) -> None:
    with pytest.warns(UserWarning, match=f"leaves the model as it is: {when}.* in its loss 0"):
        _, callback = compared(factory, tmp_path)
    assert callback.result is None


class Frozen(Deep):
    """Without dropout in what is planned, and wrong where dropout elsewhere is in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)]
        self.net = nn.Sequential(nn.Sequential(*layers), nn.Dropout(0.1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_wrong = "forward" in vars(self.net[0]) and not self.net[1].training
        return super().training_step(batch, batch_idx) * (2.0 if is_wrong else 1.0)


@pytest.mark.slow
def test_a_difference_where_a_part_is_in_eval_mode_is_found(tmp_path: Path) -> None:
    callback = remat(modules=["net.0"], memory_budget="95%")
    with pytest.warns(UserWarning, match="a planned step with dropout and batch norm in eval mode differs"):
        run(tmp_path, Frozen(), callback, max_steps=1)
    assert callback.result is None


class Sized(Watching):
    """Can be run with the batch that it expects alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        assert len(batch[0]) == BATCH
        return loss


class Shaped(nn.Module):
    """Has the size of the batch in its code, so that another one would be captured anew."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * 2 if x.shape[0] == BATCH else self.net(x) * 3


class Specialized(Watching):
    def __init__(self) -> None:
        super().__init__()
        self.net = Shaped(self.net)


@pytest.mark.slow
@pytest.mark.parametrize("factory", [Sized, Specialized])
def test_where_no_slice_serves_the_whole_batch_is_compared(tmp_path: Path, factory: type[Watching]) -> None:
    steps, callback = compared(factory, tmp_path)
    assert callback.result.step.num_recomputed
    sizes = [size for size, *_ in steps]
    assert sizes == sorted(sizes)
    assert set(sizes) == {4, 16, BATCH}
    assert sizes.count(4) < 3
    assert sizes.count(BATCH) > 6


@pytest.mark.slow
@pytest.mark.parametrize("factory", [Watching, Specialized])
def test_nothing_is_captured_or_learnt_that_training_would_not_have(
    tmp_path: Path, factory: type[Watching], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    learnt = Diary[tuple[Places, set[int]]]()  # of which sizes
    places = Learning.places

    def noted(learning: Learning, n: int, saved: list[Tensor]) -> Places:
        found = places(learning, n, saved)
        learnt.add((found, {len(t) for t in saved}))
        return found

    monkeypatch.setattr(Learning, "places", noted)
    for self_check in (False, True, True):  # the last one has the plan of the one before, which is not tried again
        folder = tmp_path / str(self_check)
        callback, module = remat(self_check=self_check, plan_path=folder, planner=untimed), factory()
        counters.clear()
        seen = Diary[Any]()
        learnt.read()

        def note(optimizer: Any, seen: Diary[Any] = seen, module: nn.Module = module) -> None:
            del optimizer
            known = [own for program in programs_in(module) for own in program.learned.values()]
            seen.add((dict(counters["stats"]), len(programs_in(module)), known))

        module.on_before_zero_grad = note
        run(tmp_path, module, callback, max_steps=3)
        assert callback.result is not None
        all_learnt = learnt.read()
        found.append(
            [
                (captured, programs, {s for own, sizes in all_learnt if any(own is k for k in known) for s in sizes})
                for captured, programs, known in seen.read()
            ]
        )
    assert len(found[0]) == 3
    assert all(BATCH in sizes and not sizes & {*step_check.SLICES} - {WIDTH} for seen in found for *_, sizes in seen)
    plain, checked, stored = ([(captured, programs) for captured, programs, _ in seen] for seen in found)
    assert plain == checked
    assert [programs for _, programs in stored] == [programs for _, programs in plain]


class Noisy(Watching):
    """Is never the same twice."""

    numbers = itertools.count(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * next(self.numbers)


@pytest.mark.slow
def test_a_step_that_is_not_the_same_twice_is_told_and_planned(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="its plain runs differ from each other in their loss"):
        _, callback = compared(Noisy, tmp_path)
    assert callback.result.step.num_recomputed


class Failing(Watching):
    """Fails where it is tried with what it does not know."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch:
            raise RuntimeError("no second epoch")
        return super().training_step(batch, batch_idx)


class Exhausting(Watching):
    """Has no memory for the steps that are compared, planned or plain."""

    only_plain = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) < BATCH and not (self.only_plain and self.is_rewritten):
            raise torch.OutOfMemoryError("out of memory")
        return super().training_step(batch, batch_idx)


class ExhaustingPlain(Exhausting):
    only_plain = True


@pytest.mark.slow
@pytest.mark.parametrize("factory", [Failing, Exhausting, ExhaustingPlain])
def test_steps_that_cannot_be_tried_are_no_difference(tmp_path: Path, factory: type[Watching]) -> None:
    steps, callback = compared(factory, tmp_path)
    assert callback.result.step.num_recomputed
    assert steps


class FailingAsPlanned(Watching):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.is_rewritten and self.global_step:
            raise RuntimeError("lost its way")
        return loss


@pytest.mark.slow
def test_an_error_of_the_planned_step_alone_is_a_difference(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="differs from the plain one in its course: RuntimeError: lost its way"):
        _, callback = compared(FailingAsPlanned, tmp_path)
    assert callback.result is None


@pytest.mark.slow
def test_a_plain_step_that_does_not_fit_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(_device: torch.device) -> DeviceMemory:
        return DeviceMemory(0, 2**30)

    def alive(_trial: LightningTrial) -> int:
        return 100 * 2**10

    monkeypatch.setattr(step_check, "device_memory", memory)
    monkeypatch.setattr(LightningTrial, "alive_bytes", alive)
    steps, callback = compared(Sized, tmp_path)
    assert callback.result.plain_peak_bytes > 100 * 2**10 > callback.result.measured_peak_bytes
    assert {size for size, *_ in steps} <= {4, 16}


@pytest.mark.slow
def test_what_is_compared_leaves_no_trace(tmp_path: Path) -> None:
    assert_same_run(tmp_path, max_steps=6, max_epochs=2, callback=remat(self_check=True))
