"""The found size beside what else a Trainer can be asked for, and a search that meets limits and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diary import Diary
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from remat_runs import Classifier, Images, run, seeded
from test_callback import Stepping
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

import lightning_remat.batch_search.search as batch_size_module
from lightning_remat import Rematerialization, find_batch_size
from lightning_remat.measure.device_memory import DeviceMemory

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]
MIB = 2**20


def remat(**options: Any) -> Rematerialization:
    return Rematerialization("periodic", **{"memory_budget": "4MiB", "batch_size": 12, **options})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling")
@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (Stepping, {}),
        (Classifier, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (Classifier, {"precision": "bf16-mixed"}),
        (Classifier, {"limit_train_batches": 2}),
        (Classifier, {"overfit_batches": 2}),
        (Classifier, {"fast_dev_run": 2}),
    ],
    ids=["manual", "accumulate-clip", "bf16", "limit", "overfit", "fast-dev-run"],
)
def test_found_size_is_trained_within_the_budget(tmp_path: Path, factory: Any, options: dict[str, Any]) -> None:
    callback, module = remat(memory_budget="80%"), seeded(factory)
    run(tmp_path, module, callback, **{"max_steps": 2, **options})
    assert callback.result is not None
    assert callback.result.measured_peak_bytes is not None
    assert callback.result.measured_peak_bytes <= callback.result.budget_bytes < callback.result.plain_peak_bytes
    assert callback.result.plan.num_recomputed > 0
    assert set(module.sizes) == {12}


@pytest.mark.slow
def test_learning_rate_finder_runs_on_the_planned_model(tmp_path: Path) -> None:
    planned: list[bool] = []

    class Tuned(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 1e-3

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            planned.append("forward" in vars(self.net) and len(batch[0]) in (12, 64 % 12))
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=self.lr)

    module, finder = seeded(Tuned), LearningRateFinder(num_training_steps=6, early_stop_threshold=None)
    trainer = run(tmp_path, module, finder, remat(), max_steps=2)
    assert finder.optimal_lr is not None
    assert len(finder.optimal_lr.results["lr"]) >= 5
    assert all(planned[-7:])
    assert module.sizes[-2:] == [12, 12]
    assert trainer.global_step == 2


@pytest.mark.slow
@pytest.mark.parametrize("has_hyperparameters", [True, False])
def test_every_logger_records_the_size(tmp_path: Path, has_hyperparameters: bool) -> None:
    loggers = [CSVLogger(tmp_path, name="a"), CSVLogger(tmp_path, name="b")]
    module = seeded()
    if not has_hyperparameters:
        module._hparams_initial, module._log_hyperparams = None, False
        del module.hparams["batch_size"]
    run(tmp_path, module, remat(), logger=loggers, max_steps=1)
    for logger in loggers:
        assert "batch_size: 12" in (Path(logger.log_dir) / "hparams.yaml").read_text()


@pytest.mark.slow
def test_attribute_of_another_name(tmp_path: Path) -> None:
    class Named(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.samples = 8

        def train_dataloader(self) -> Any:
            return DataLoader(Images(), batch_size=self.samples)

    module = seeded(Named)
    run(tmp_path, module, remat(batch_arg_name="samples"), max_steps=2)
    assert (module.samples, module.batch_size) == (12, 8)
    assert module.sizes == [12, 12]


class Blocks(Sampler[list[int]]):
    """Yields batches and does not say of which size."""

    def __init__(self, size: int) -> None:
        self.how_many = size

    def __iter__(self) -> Any:
        return iter([list(range(i, i + self.how_many)) for i in range(0, 48, self.how_many)])

    def __len__(self) -> int:
        return 48 // self.how_many


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the training loader ignores the attribute 'batch_size'")
def test_function_for_loaders_that_do_not_say_their_size(tmp_path: Path) -> None:
    def rebatch(loader: Any, size: int) -> Any:
        return DataLoader(loader.dataset, batch_sampler=Blocks(size))

    class Own(Classifier):
        def train_dataloader(self) -> Any:
            return DataLoader(Images(), batch_sampler=Blocks(6))

    module = seeded(Own)
    run(tmp_path, module, remat(rebatch_fn=rebatch), max_steps=2)
    assert module.sizes == [12, 12]


@pytest.mark.slow
def test_gradient_scaler_is_left_as_it_was(tmp_path: Path) -> None:
    def trained(*callbacks: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        module = seeded()
        run(tmp_path, module, *callbacks, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        return module.state_dict(), scaler.state_dict()

    callback = remat(memory_budget="80%", batch_size="keep")
    (expected, plain_scaler), (state, scaler) = trained(), trained(callback)
    assert callback.result is not None
    assert callback.result.plan.num_recomputed > 0
    assert scaler == plain_scaler
    assert plain_scaler["scale"] != 2.0**10  # it has grown, so the steps were its own
    assert all(torch.equal(state[k], expected[k]) for k in expected)


@pytest.mark.slow
def test_error_of_the_users_in_an_executed_step_leaves_everything_as_training_does(tmp_path: Path) -> None:
    class Failing(Classifier):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            super().backward(loss, *args, **kwargs)
            raise LookupError("mine")

    module, callback = seeded(Failing), remat()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(LookupError, match="mine"):
        run(tmp_path, module, callback)
    assert (module.batch_size, module.steps, module.sizes) == (8, 1, [12])
    assert module.hparams["batch_size"] == 8
    assert "forward" not in vars(module.net)
    assert "log" not in vars(module)
    parameters = {n for n, _ in module.named_parameters()}
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items() if k in parameters)
    assert callback in module.trainer.callbacks


@pytest.mark.slow
def test_replanning_is_refused_with_manual_optimization(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="on_oom='replan' has no effect with several devices or manual optimization"):
        run(tmp_path, seeded(Stepping), remat(on_oom="replan"), max_steps=1)


class Limited(Classifier):
    """A device on which batches of more than 20 samples do not fit, whatever the prediction says."""

    tried: ClassVar = Diary[int]()
    size = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if torch.is_grad_enabled() and self.trainer.state.stage is not None:
            self.size = len(batch[0])
            self.tried.add(self.size)
        return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.size > 20:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
        super().backward(loss, *args, **kwargs)


@pytest.mark.slow
def test_size_that_runs_out_of_memory_when_executed_is_not_returned(tmp_path: Path) -> None:
    Limited.tried.read()
    callback, module = remat(memory_budget="6MiB", batch_size="auto"), seeded(Limited)
    run(tmp_path, module, callback, max_steps=2)
    assert callback.result is not None
    # What ran out and what fitted close in on the limit, in the steps that a search may run.
    assert max(Limited.tried.read()) > 20 >= callback.result.batch_size > 16
    assert callback.result.num_steps <= batch_size_module.MOST_STEPS
    assert module.sizes == [callback.result.batch_size] * 2


@pytest.mark.slow
def test_free_memory_less_the_margin_is_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size_module, "device_memory", lambda device: DeviceMemory(64 * MIB, 128 * MIB))
    module = seeded(batch_size=12)
    alive = sum(t.nbytes for t in [*module.parameters(), *module.buffers(), *next(iter(module.train_dataloader()))])
    budgets: dict[Any, int] = {}
    for wanted in (None, 0.5):
        callback = remat(memory_budget=wanted, margin=0.2)
        run(tmp_path, seeded(), callback, max_steps=1)
        assert callback.result is not None
        budgets[wanted] = callback.result.budget_bytes
    assert budgets == {None: int((64 * MIB + alive) * 0.8), 0.5: int(0.5 * int(128 * MIB * 0.8))}


@pytest.mark.slow
def test_what_draws_the_report_is_loaded_before_free_memory_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def count(device: torch.device) -> DeviceMemory:
        events.append("count")
        return DeviceMemory(64 * MIB, 128 * MIB)

    monkeypatch.setattr(batch_size_module, "device_memory", count)
    monkeypatch.setattr(batch_size_module, "load_plotting", lambda: events.append("load"))
    run(tmp_path, seeded(), remat(memory_budget=None), max_steps=1)
    assert events[:2] == ["load", "count"]


class Heavy(nn.Module):
    """Parameters in plenty and small activations: the optimizer's step is the predicted peak."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_loss_that_outweighs_the_optimizers_step_corrects_the_prediction() -> None:
    torch.manual_seed(0)
    net = Heavy()

    def loss_of(x: Tensor) -> Tensor:
        held = net(x).repeat(1, 700)  # 128 * 700 values a sample, outside what is planned
        return (held * held).sum()

    optimizer = torch.optim.Adam(net.parameters())
    found = find_batch_size(
        net, torch.randn(4, 128), loss_of, optimizer, "periodic", memory_budget="100%", batch_size="keep"
    )
    assert found.measured_peak_bytes is not None
    assert found.step.surroundings.optimizer_step_bytes < found.measured_peak_bytes <= found.budget_bytes
    assert abs(found.prediction_error or 0) < 0.02


class Detector(Classifier):
    """Gets lists of images of several sizes and of their objects, as torchvision's detection does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, objects = batch
        self.sizes.append(len(images))
        pooled = torch.stack([nn.functional.adaptive_avg_pool2d(x, 8) for x in images])
        labels = torch.stack([y["labels"][0] for y in objects])
        return nn.functional.cross_entropy(self.net(pooled), labels)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        shapes = torch.randint(8, 14, (64, 2), generator=generator).tolist()
        data = [(torch.randn(3, *shape), {"labels": torch.arange(1 + k % 4)}) for k, shape in enumerate(shapes)]
        return DataLoader(
            data, batch_size=self.batch_size, collate_fn=lambda samples: tuple(zip(*samples, strict=True))
        )  # pyright: ignore


@pytest.mark.slow
def test_a_size_is_found_for_lists_of_samples(tmp_path: Path) -> None:
    callback, module = remat(memory_budget="4MiB", batch_size="auto", max_batch_size=32), seeded(Detector)
    run(tmp_path, module, callback, max_steps=2)
    assert callback.result is not None
    assert callback.result.batch_size > 8
    assert set(module.sizes[-2:]) == {callback.result.batch_size}
