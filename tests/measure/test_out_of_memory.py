"""Errors that say that memory ran out, and those that only look like it; what a step that ran out of it reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diary import Diary
from remat_runs import Classifier, Images, run, seeded
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_remat import Rematerialization
from lightning_remat.measure.out_of_memory import is_out_of_memory, is_too_small_for_batch_norm


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("HIP out of memory. Tried to allocate"),
        RuntimeError("XPU out of memory, please use `empty_cache`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
        RuntimeError("std::bad_alloc"),
        MemoryError(),
    ],
)
def test_out_of_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("Expected more than 1 value per channel when training, got input size torch.Size([1, 8])"),
        KeyError("out of memory"),
    ],
)
def test_other_errors(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_batch_norm_is_recognized_by_what_torch_says() -> None:
    with pytest.raises(ValueError, match="per channel") as caught:
        nn.BatchNorm1d(3)(torch.randn(1, 3))
    assert is_too_small_for_batch_norm(caught.value)


class Failing(Classifier):
    """Runs out of memory in its third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*")
def test_error_in_training_carries_the_table_and_three_remedies(tmp_path: Path) -> None:
    callback = Rematerialization("periodic", memory_budget="80%", batch_size="keep")
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        run(tmp_path, seeded(Failing), callback)
    (note,) = caught.value.__notes__
    assert callback.result is not None
    assert "measured peak" in note
    assert "batch_size=4" in note
    assert f"memory_budget={int(callback.result.budget_bytes * 0.85)}" in note
    assert all(f"\n{i}. " in note for i in (1, 2, 3))


EXHAUSTED = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"


class FailingInBackward(Classifier):
    """Runs out of memory after a forward that drew random numbers, updated buffers and logged."""

    failures: ClassVar = Diary[int]()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.failures.take(self.global_step):
            raise RuntimeError(EXHAUSTED)
        super().backward(loss, *args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True)
        return loss


def replanned(root: Path, failures: list[int], **options: Any) -> tuple[Any, Rematerialization]:
    for step in failures:
        FailingInBackward.failures.add(step)
    callback = Rematerialization("periodic", memory_budget="85%", batch_size="keep", on_oom="replan")
    module = seeded(FailingInBackward)
    try:
        module.metrics = dict(run(root, module, callback, max_steps=-1, max_epochs=1, **options).callback_metrics)
    finally:
        FailingInBackward.failures.read()
    return module, callback


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_replanned_step_gives_the_results_of_one_that_did_not_fail(tmp_path: Path, accumulate: int) -> None:
    expected, _ = replanned(tmp_path, [], accumulate_grad_batches=accumulate)
    with pytest.warns(UserWarning, match="is run again by a tighter plan"):
        module, _ = replanned(tmp_path, [2], accumulate_grad_batches=accumulate)
    for name, value in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    assert module.steps == expected.steps
    assert all(torch.equal(module.metrics[k], v) for k, v in expected.metrics.items())


class Alternating(FailingInBackward):
    """Every second batch goes through another network."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Tanh()) for _ in range(12)))
        self.rewritten: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2 == 0:
            return super().training_step(batch, batch_idx)
        self.rewritten.append("_rematerialization" in vars(self.other))
        return self.other(torch.randn(512, 64)).square().mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a training step needed")  # of the network that the first batch did not go through
@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*")
def test_the_step_that_ran_out_of_memory_is_the_one_that_is_planned(tmp_path: Path) -> None:
    FailingInBackward.failures.add(3)
    budget = 3 << 20
    callback = Rematerialization("periodic", memory_budget=budget, batch_size="keep", on_oom="replan")
    module = seeded(Alternating)
    with pytest.warns(UserWarning, match="is run again by a tighter plan"):
        run(tmp_path, module, callback, max_steps=4)
    FailingInBackward.failures.read()
    assert module.rewritten[-1], "what the batch goes through runs plain"
    assert callback.result is not None
    assert callback.result.budget_bytes < budget
    assert callback.result.step.keys == ("other",)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*")
def test_only_one_step_is_retried(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="is run again"), pytest.raises(RuntimeError, match="can't allocate memory"):
        replanned(tmp_path, [2, 3])


class FailingInValidation(Classifier):
    """Runs out of memory in a validation step that drew random numbers, counted and logged."""

    failures: ClassVar = Diary[int]()

    def val_dataloader(self) -> Any:
        return DataLoader(Images(24), batch_size=self.batch_size)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.drawn = torch.rand(())
        self.counted = getattr(self, "counted", 0) + 1
        super().validation_step(batch, batch_idx)
        self.log("drawn", self.drawn, on_epoch=True)
        if self.failures.take(batch_idx):
            raise RuntimeError(EXHAUSTED)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*")
def test_validation_that_runs_out_of_memory_is_run_again(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": 1, "num_sanity_val_steps": 0}
    for failures in ([], [1]):
        for batch_idx in failures:
            FailingInValidation.failures.add(batch_idx)
        module = seeded(FailingInValidation)
        callback = Rematerialization("periodic", memory_budget="85%", batch_size="keep", on_oom="replan")
        if failures:
            with pytest.warns(UserWarning, match="a validation step ran out of memory and is run again"):
                trainer = run(tmp_path, module, callback, **options)
        else:
            trainer = run(tmp_path, module, callback, **options)
        assert "validation_step" not in vars(trainer.strategy)
        found.append({**module.state_dict(), **trainer.callback_metrics, "counted": torch.tensor(module.counted)})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*")
def test_self_check_passes_and_notices_a_difference(tmp_path: Path) -> None:
    options: dict[str, Any] = {"memory_budget": "85%", "batch_size": "keep", "self_check": True}
    callback = Rematerialization("periodic", **options)
    run(tmp_path, seeded(), callback)
    assert callback.result is not None

    class Telling(Classifier):
        """Does something else when it is rematerialized."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            factor = 2.0 if "forward" in vars(self.net) else 1.0
            return factor * super().training_step(batch, batch_idx)

    callback, module = Rematerialization("periodic", **options), seeded(Telling)
    with pytest.warns(
        UserWarning, match="leaves the model as it is: a planned step differs from the plain one in its loss"
    ):
        run(tmp_path, module, callback)
    assert callback.result is None
    assert module.steps == 4
