"""Rematerialization in a Trainer at a fixed batch size: the run is the plain run, within the budget."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from remat_runs import Classifier, Images, network, run, seeded
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_remat import InfeasibleBudgetError, Rematerialization

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]


def remat(**options: Any) -> Rematerialization:
    return Rematerialization("periodic", **{"memory_budget": "80%", "batch_size": "keep", **options})


class Recorder(Callback):
    """Random states and metrics after the run."""

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.randoms = random.random(), float(np.random.random()), torch.rand(3)  # noqa: NPY002
        self.metrics = dict(trainer.callback_metrics)


def assert_same_run(root: Path, factory: Any = Classifier, arguments: Any = None, **options: Any) -> Rematerialization:
    """Runs with and without the callback and compares everything, bit by bit."""
    arguments = arguments or {}
    plain, recorder = seeded(factory, **arguments), Recorder()
    run(root / "plain", plain, recorder, **options)
    planned, other, callback = seeded(factory, **arguments), Recorder(), remat()
    run(root / "planned", planned, callback, other, **options)
    assert callback.result is not None
    assert callback.result.step.num_recomputed > 0
    state, expected = planned.state_dict(), plain.state_dict()
    assert state.keys() == expected.keys()
    for key in expected:
        assert torch.equal(state[key], expected[key]), key
    assert other.randoms[:2] == recorder.randoms[:2]
    assert torch.equal(other.randoms[2], recorder.randoms[2])
    assert other.metrics.keys() == recorder.metrics.keys()
    assert all(torch.equal(other.metrics[k], recorder.metrics[k]) for k in recorder.metrics)
    assert (planned.steps, planned.sizes) == (plain.steps, plain.sizes)
    return callback


class Stepping(Classifier):
    """Manual optimization with two optimizers' worth of state and a scheduler that counts batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()


class Scheduled(Classifier):
    """Asks for the number of batches while optimizers are configured, which builds the loader early."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=int(total))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (Classifier, {}),
        pytest.param(Classifier, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, marks=pytest.mark.slow),
        pytest.param(Classifier, {"precision": "bf16-mixed"}, marks=pytest.mark.slow),
        pytest.param(Classifier, {"limit_train_batches": 2, "max_steps": -1, "max_epochs": 2}, marks=pytest.mark.slow),
        pytest.param(Classifier, {"overfit_batches": 2}, marks=pytest.mark.slow),
        (Classifier, {"fast_dev_run": 2}),
        (Stepping, {}),
        (Scheduled, {"max_steps": -1, "max_epochs": 1}),
    ],
    ids=["plain", "accumulate-clip", "bf16", "epochs", "overfit", "fast-dev-run", "manual", "scheduled"],
)
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling")
def test_run_is_bit_identical(tmp_path: Path, factory: Any, options: dict[str, Any]) -> None:
    assert_same_run(tmp_path, factory, **options)


@pytest.mark.slow
def test_validation_and_sanity_check_are_untouched(tmp_path: Path) -> None:
    data = DataLoader(Images(16), batch_size=8)
    assert_same_run(tmp_path, fit={"val_dataloaders": data}, val_check_interval=2, num_sanity_val_steps=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*PyTorch Profiler default schedule.*")
@pytest.mark.filterwarnings("ignore:.*Profiler clears events.*")
def test_a_profiler_of_pytorchs_does_not_divide_the_forward(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="profile")
    callback = assert_same_run(tmp_path, profiler=profiler)
    assert callback.result is not None
    assert callback.result.step.keys == ("net",)
    assert vars(profiler)["_record_module_names"]


@pytest.mark.slow
def test_measured_peak_is_within_the_budget_and_predicted_beside_it(tmp_path: Path) -> None:
    callback = remat()
    run(tmp_path, seeded(), callback)
    result = callback.result
    assert result is not None
    assert result.measured_peak_bytes is not None
    assert result.measured_peak_bytes <= result.budget_bytes < result.plain_peak_bytes
    assert result.budget_bytes == pytest.approx(0.8 * result.plain_peak_bytes, rel=0.02)
    assert result.num_steps <= 6


@pytest.mark.slow
def test_plain_prediction_is_exact(tmp_path: Path) -> None:
    callback = remat(memory_budget="100%")
    run(tmp_path, seeded(), callback)
    assert callback.result is not None
    assert callback.result.step.num_recomputed == 0
    assert abs(callback.result.prediction_error or 0) < 0.01


@pytest.mark.slow
def test_forward_is_restored_after_fit_and_after_an_error(tmp_path: Path) -> None:
    module = seeded()
    run(tmp_path, module, remat())
    assert "forward" not in vars(module.net)

    class Failing(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                assert "forward" in vars(self.net)
                raise RuntimeError("user's own")

    module = seeded(Failing)
    with pytest.raises(RuntimeError, match="user's own"):
        run(tmp_path, module, remat())
    assert "forward" not in vars(module.net)


class OwnForward(LightningModule):
    """A LightningModule whose own forward is the network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.body = network(16, 4)[1:]
        self.steps, self.sizes = 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.stem(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(Images(), batch_size=8, shuffle=True)


class TwoParts(OwnForward):
    """Two submodules called one after the other by training_step itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self.body(self.stem(batch[0])), batch[1])
        self.log("loss", loss)
        return loss


@pytest.mark.slow
def test_own_forward_is_a_region(tmp_path: Path) -> None:
    callback = assert_same_run(tmp_path, OwnForward)
    assert callback.result is not None
    assert callback.result.step.keys == ("",)


@pytest.mark.slow
def test_parts_share_the_budget(tmp_path: Path) -> None:
    callback = assert_same_run(tmp_path, TwoParts)
    assert callback.result is not None
    assert callback.result.step.keys == ("stem", "body")


@pytest.mark.slow
def test_metrics_reach_every_logger_and_reports_are_written(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name="a"), CSVLogger(tmp_path, name="b")]
    callback = remat()
    run(tmp_path, seeded(), callback, logger=loggers)
    assert callback.result is not None
    for logger in loggers:
        lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
        names = lines[0].split(",")
        for name in (
            "batch_size",
            "budget_bytes",
            "peak_bytes",
            "predicted_peak_bytes",
            "plain_peak_bytes",
            "samples_per_second",
            "step_seconds",
            "recompute_overhead",
        ):
            assert f"remat/{name}" in names
        column = names.index("remat/peak_bytes")
        peaks = [float(line.split(",")[column]) for line in lines[1:] if line.split(",")[column]]
        assert len(peaks) == 4
        assert max(peaks) <= callback.result.budget_bytes
        # From the second step on optimizer state and gradients are there, as in the verified step.
        assert peaks[-1] == pytest.approx(callback.result.measured_peak_bytes, rel=0.02)
    folder = Path(loggers[0].log_dir)
    report = json.loads((folder / "remat_report.json").read_text())
    assert report["measured_peak_bytes"] == callback.result.measured_peak_bytes
    assert report["run"]["peak_bytes"] == max(peaks)
    assert (folder / "remat_timeline.png").stat().st_size > 1000


@pytest.mark.slow
def test_infeasible_budget_names_what_it_needs_and_leaves_everything_as_it_was(tmp_path: Path) -> None:
    module = seeded()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    attributes = set(vars(module))
    with pytest.raises(InfeasibleBudgetError, match=r"at batch size 8, budget 200\.00 KiB: because") as caught:
        run(tmp_path, module, remat(memory_budget="200KiB"))
    assert caught.value.minimum_bytes > caught.value.budget_bytes == 200 * 1024
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert "forward" not in vars(module.net)
    assert module.steps == 0
    assert set(vars(module)) - attributes <= {"_trainer", "_current_fx_name"}
    assert all(p.grad is None for p in module.parameters())


class Divided(nn.Module):
    """Breaks between its halves."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([network(depth=2)[:-3], nn.Sequential(nn.Flatten(), nn.LazyLinear(5))])

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.halves
        h = first(x)
        torch._dynamo.graph_break()
        return second(h)


@pytest.mark.slow
def test_an_infeasible_budget_tells_what_is_not_planned(tmp_path: Path) -> None:
    net = Divided()
    net(torch.zeros(1, 3, 16, 16))
    with pytest.raises(InfeasibleBudgetError, match=r"(?s)Remedies: .*\nParts of the step are not planned:\n  net: "):
        run(tmp_path, seeded(lambda: Classifier(net)), remat(memory_budget="20%"), max_steps=1)


@pytest.mark.slow
def test_on_infeasible_plain_trains_the_plain_model(tmp_path: Path) -> None:
    callback = remat(memory_budget="200KiB", on_infeasible="plain")
    module = seeded()
    with pytest.warns(UserWarning, match="leaves the model as it is"):
        run(tmp_path, module, callback)
    assert callback.result is None
    assert module.steps == 4


def test_batch_size_finder_beside_it_is_refused(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import BatchSizeFinder

    module = seeded()
    del module.hparams["batch_size"]  # Lightning's finder warns where it finds two
    with pytest.raises(MisconfigurationException, match="remove BatchSizeFinder"):
        run(tmp_path, module, remat(), BatchSizeFinder())


def test_error_of_the_users_is_raised_by_training_alone(tmp_path: Path) -> None:
    class Failing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            raise KeyError("mine")

    module = seeded(Failing)
    with pytest.raises(KeyError, match="mine") as caught:
        run(tmp_path, module, remat())
    assert caught.value.__context__ is None
    assert module.steps == 1  # training's own: those that were tried are undone


@pytest.mark.slow
def test_stretches_are_compiled_for_the_length_of_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the bitwise comparison; with a compiler that leaves them as they are the run is the plain one."""
    given: list[nn.Module] = []

    def compiles(module: nn.Module, **_options: Any) -> nn.Module:
        given.append(module)
        return module

    monkeypatch.setattr(torch, "compile", compiles)
    plain = seeded(Classifier)
    run(tmp_path / "plain", plain)
    planned, callback = seeded(Classifier), remat(compile_stretches=True)
    run(tmp_path / "planned", planned, callback)
    assert callback.result is not None
    assert given
    for p, q in zip(plain.parameters(), planned.parameters(), strict=True):
        assert torch.equal(p, q)
