"""What Lightning ships, with the callback and without: models × callbacks × options, bit for bit the same run."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.demos.lstm import LightningLSTM, SequenceSampler, SimpleLSTM
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer
from lightning.pytorch.loggers import CSVLogger
from remat_runs import run, seeded
from same_runs import Deep, Manual, assert_same_run, deep, differences, remat, samples
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_remat import Rematerialization

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
    pytest.mark.filterwarnings("ignore:Rematerialization leaves the model as it is"),
    pytest.mark.filterwarnings("ignore:Rematerialization plans the lowest peak instead"),
    pytest.mark.filterwarnings("ignore:a training step needed .* more than the budget"),  # masks, averages
    pytest.mark.filterwarnings("ignore:Swapping scheduler"),
    pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist"),  # batch norm stays trained
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You requested to overfit"),
    pytest.mark.filterwarnings("ignore:.*(nested tensor|flatten_parameters|_named_members|Checkpoint directory).*"),
]
VOCABULARY = 23


class Checked(Deep):
    """Validated after an epoch, or as often as is asked for; has what the callbacks look for."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-2
        self.backbone, self.head = self.net, nn.Linear(16, 16)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.head(self.net(batch[0])).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.head(self.net(batch[0])).square().mean())

    def val_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class Adversaries(Manual):
    """Two optimizers and two networks, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.other = deep()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # pyright: ignore
        for optimizer, loss_of in ((first, self.first_loss), (second, self.second_loss)):
            self.toggle_optimizer(optimizer)
            loss = loss_of(batch[0])
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.seen.append(loss.item())

    def first_loss(self, x: Tensor) -> Tensor:
        return self.other(self.net(x)).square().mean()

    def second_loss(self, x: Tensor) -> Tensor:
        return (self.other(self.net(x).detach()) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net.parameters()), torch.optim.SGD(self.other.parameters(), 0.1)]


def text() -> TensorDataset:
    words = torch.randint(VOCABULARY, (64, 9), generator=torch.Generator().manual_seed(2))
    return TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())


class SmallTransformer(LightningTransformer):
    def __init__(self) -> None:
        super().__init__(vocab_size=VOCABULARY)
        self.model = Transformer(vocab_size=VOCABULARY, ninp=16, nhead=2, nhid=16, nlayers=2)

    def prepare_data(self) -> None:
        pass

    def train_dataloader(self) -> Any:
        return DataLoader(text(), batch_size=16, shuffle=True)


class SmallLSTM(LightningLSTM):
    def __init__(self) -> None:
        super().__init__(vocab_size=VOCABULARY)
        self.model = SimpleLSTM(vocab_size=VOCABULARY, ninp=16, nhid=16, nlayers=2)

    def prepare_data(self) -> None:
        pass

    def train_dataloader(self) -> Any:
        return DataLoader(text(), batch_sampler=SequenceSampler(text(), batch_size=16))


class EveryStep(WeightAveraging):
    """Averages after every step."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None


def callbacks(root: Path) -> dict[str, Callable[[], Sequence[Callback]]]:
    return {
        "swa": lambda: [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)],
        "averaging": lambda: [EveryStep()],
        "ema": lambda: [EMAWeightAveraging(decay=0.9)],
        "pruning": lambda: [ModelPruning("l1_unstructured", amount=0.2, parameter_names=["weight"])],
        "finetuning": lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)],
        "learning-rate": lambda: [LearningRateFinder(num_training_steps=5, early_stop_threshold=None)],
        "accumulation": lambda: [GradientAccumulationScheduler({0: 1, 1: 2})],
        "checkpoints": lambda: [ModelCheckpoint(root / "ckpt", every_n_train_steps=2, save_top_k=-1)],
        "early-stopping": lambda: [EarlyStopping("val_loss", patience=1, min_delta=10.0)],
        "several": lambda: [
            EMAWeightAveraging(decay=0.9),
            GradientAccumulationScheduler({1: 2}),
            Timer(),
            EarlyStopping("loss_epoch", patience=5),
        ],
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"precision": "bf16-mixed"},
    "double": {"precision": "64-true"},
    "accumulate": {"accumulate_grad_batches": 2},
    "clip": {"gradient_clip_val": 0.1},
    "clip-value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "max-steps": {"max_steps": 5},
    "limits": {"limit_train_batches": 2, "limit_val_batches": 1},
    "val-interval": {"val_check_interval": 2, "num_sanity_val_steps": 1},
    "overfit": {"overfit_batches": 2},
    "detect-anomaly": {"detect_anomaly": True},
    "no-inference-mode": {"inference_mode": False},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
    "deterministic": {"deterministic": True},
}
TWO_EPOCHS: dict[str, Any] = {"max_steps": -1, "max_epochs": 2}


def mostly_slow(names: Iterable[str], *quick: str) -> list[Any]:
    """The names, of which only some are tried in the quick suite."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


# SWA changes the momentum of batch norm at the end, which divides the forward into graphs that are not planned.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*runs without rematerialization")
@pytest.mark.parametrize("name", mostly_slow(callbacks(Path()), "swa", "learning-rate", "checkpoints"))
def test_callbacks(tmp_path: Path, name: str) -> None:
    made = callbacks(tmp_path)[name]
    options = {**TWO_EPOCHS, "max_epochs": 3, "enable_checkpointing": name == "checkpoints"}
    # With a frozen backbone there is nothing to recompute; it is thawed under a plan that has seen it frozen.
    budget, is_planned = ("100%", None) if name == "finetuning" else ("85%", True)
    callback = remat(memory_budget=budget)
    assert_same_run(tmp_path, Checked, callbacks=made, callback=callback, is_planned=is_planned, **options)


@pytest.mark.sampled
@pytest.mark.parametrize("name", mostly_slow(OPTIONS, "none", "bf16", "accumulate", "val-interval"))
def test_options(tmp_path: Path, name: str) -> None:
    assert_same_run(tmp_path, Checked, callback=remat(memory_budget="85%"), **{**TWO_EPOCHS, **OPTIONS[name]})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "bf16", "limits", "max-steps"])
def test_manual_optimization(tmp_path: Path, name: str) -> None:
    assert_same_run(tmp_path, Adversaries, **{**TWO_EPOCHS, **OPTIONS[name]})


DEMOS: list[Any] = [BoringModel, ManualOptimBoringModel, SmallTransformer, SmallLSTM]


@pytest.mark.sampled
@pytest.mark.parametrize("name", mostly_slow(["none", "accumulate", "clip", "limits", "max-steps"], "none"))
@pytest.mark.parametrize("factory", DEMOS)
def test_demos(tmp_path: Path, factory: Any, name: str) -> None:
    if factory is ManualOptimBoringModel and name in ("accumulate", "clip"):
        pytest.skip("Lightning refuses it with manual optimization")
    options = {**TWO_EPOCHS, **OPTIONS[name]}
    callback = remat(memory_budget="95%", on_infeasible="minimum" if factory is SmallTransformer else "plain")
    assert_same_run(tmp_path, factory, callback=callback, is_planned=None, **options)


@pytest.mark.slow
def test_learning_rates_are_monitored(tmp_path: Path) -> None:
    rates: list[list[str]] = []
    for kind, ours in (("plain", []), ("planned", [remat(memory_budget="85%")])):
        logger = CSVLogger(tmp_path / kind)
        run(tmp_path, seeded(Checked), *ours, LearningRateMonitor(), logger=logger, **TWO_EPOCHS)
        rows = csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines())
        rates.append([row["lr-Adam"] for row in rows if row["lr-Adam"]])
    assert rates[0] == rates[1]
    assert len(rates[0]) >= 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_checkpoints_of_the_middle_of_an_epoch_resume_to_the_same_run(tmp_path: Path) -> None:
    found: list[Any] = []
    for kind in ("plain", "planned"):
        ours = [] if kind == "plain" else [remat(memory_budget="85%")]
        saving = ModelCheckpoint(tmp_path / kind, every_n_train_steps=3, filename="{step}", save_top_k=-1)
        run(tmp_path, seeded(Checked), *ours, saving, max_steps=3, enable_checkpointing=True)
        ours = [] if kind == "plain" else [remat(memory_budget="85%")]
        module = seeded(Checked)
        trainer = run(tmp_path, module, *ours, max_steps=7, fit={"ckpt_path": tmp_path / kind / "step=3.ckpt"})
        found.append({"state": module.state_dict(), "seen": module.seen, "steps": trainer.global_step})
    assert not differences(found[0], found[1])


@pytest.mark.slow
def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train"])
    states: list[Any] = []
    for ours in ([], [remat(memory_budget="85%")]):
        defaults: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu", "default_root_dir": tmp_path}
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        cli = LightningCLI(
            Checked,
            seed_everything_default=3,
            trainer_defaults={**defaults, **quiet, "callbacks": ours, "enable_model_summary": False},
            args=["fit"],
            save_config_callback=None,
        )
        states.append(cli.model.state_dict())
        assert not ours or ours[0].result is not None
    assert not differences(states[0], states[1])


@pytest.mark.slow
def test_command_line_builds_the_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train"])
    words = ["--trainer.callbacks=lightning_remat.Rematerialization", "--trainer.callbacks.memory_budget=85%"]
    words += ["--trainer.callbacks.batch_size=keep", "--trainer.callbacks.planner=periodic", "--trainer.max_steps=2"]
    words += ["--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.accelerator=cpu"]
    words += [f"--trainer.default_root_dir={tmp_path}", "--trainer.enable_progress_bar=false"]
    cli = LightningCLI(Checked, args=["fit", *words], save_config_callback=None)
    (callback,) = [c for c in cli.trainer.callbacks if isinstance(c, Rematerialization)]  # pyright: ignore
    assert callback.result is not None
    assert callback.result.step.num_recomputed > 0
