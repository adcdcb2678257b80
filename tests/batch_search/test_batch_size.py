"""The search: what it returns was executed, fits, and is the best that the settings allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers import CSVLogger
from remat_runs import Classifier, Images, Unlimited, network, run, seeded
from torch import Tensor
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from lightning_remat import InfeasibleBudgetError, Rematerialization, find_batch_size, restore
from lightning_remat.batch_search.plain_trial import PlainTrial
from lightning_remat.reports.result import Result
from lightning_remat.trainer.lightning_step import LightningTrial

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning", "ignore:.*(treespec|LeafSpec|isinstance).*"
)


def search(root: Path, module: Any = None, fit: Any = None, **options: Any) -> tuple[Result, Any, Any]:
    callback = Rematerialization("periodic", **{"memory_budget": "8MiB", **options})
    module = seeded(Unlimited) if module is None else module
    trainer = run(root, module, callback, max_steps=2, fit=fit)
    assert callback.result is not None
    return callback.result, module, trainer


@pytest.mark.slow
def test_largest_size_fits_and_the_next_does_not(tmp_path: Path) -> None:
    result, module, _ = search(tmp_path)
    assert result.measured_peak_bytes is not None
    assert result.measured_peak_bytes <= result.budget_bytes == 8 * 2**20
    assert result.num_steps <= 6
    assert module.sizes == [result.batch_size] * 2
    fits = {c.batch_size: c.fits for c in result.trials}
    assert fits[result.batch_size]
    assert not fits[result.batch_size + 1]
    # More than memory allows the plain model, of which the table has the figures too.
    plain = [c.batch_size for c in result.trials if c.plain_peak_bytes <= result.budget_bytes]
    assert result.batch_size > max(plain)
    assert result.plan.num_recomputed > 0


@pytest.mark.slow
def test_prediction_at_a_size_never_profiled_is_exact(tmp_path: Path) -> None:
    result, _, _ = search(tmp_path)
    assert result.batch_size > 16
    assert abs(result.prediction_error or 0) < 0.01


@pytest.mark.slow
def test_most_samples_per_second(tmp_path: Path) -> None:
    result, _, _ = search(tmp_path, objective="throughput")
    rates = {c.batch_size: c.samples_per_second or 0.0 for c in result.trials if c.fits}
    assert rates[result.batch_size] == max(rates.values())
    assert len(rates) > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "holds"),
    [
        ({"multiple_of": 8}, lambda size: size % 8 == 0),
        ({"max_batch_size": 10}, lambda size: size == 10),
        ({"min_batch_size": 12, "multiple_of": 5}, lambda size: size >= 15 and size % 5 == 0),
        ({"batch_size": 12}, lambda size: size == 12),
        ({"batch_size": "keep"}, lambda size: size == 8),
        ({"max_overhead": 0.0}, lambda size: size < 25),
    ],
    ids=["multiple", "max", "min", "given", "keep", "overhead"],
)
def test_limits(tmp_path: Path, options: dict[str, Any], holds: Any) -> None:
    result, module, _ = search(tmp_path, **options)
    assert holds(result.batch_size), result.batch_size
    assert module.sizes == [result.batch_size] * 2
    if options.get("max_overhead") is not None:
        assert result.recompute_overhead == 0


@pytest.mark.slow
def test_effective_batch_size_sets_accumulation(tmp_path: Path) -> None:
    result, _, trainer = search(tmp_path, effective_batch_size=60)
    assert 60 % result.batch_size == 0
    assert trainer.accumulate_grad_batches == 60 // result.batch_size > 1
    assert result.step.surroundings.is_accumulating


@pytest.mark.slow
def test_data_set_limits_the_size(tmp_path: Path) -> None:
    result, _, _ = search(tmp_path, seeded(), memory_budget="1GiB")
    assert result.batch_size == 64
    assert "largest size allowed" in result.choice


@pytest.mark.slow
def test_nothing_fits(tmp_path: Path) -> None:
    module = seeded(Unlimited)
    with pytest.raises(InfeasibleBudgetError, match=r"at batch size 1, budget 300\.00 KiB: because of node") as caught:
        search(tmp_path, module, memory_budget="300KiB")
    assert caught.value.minimum_bytes > 300 * 1024
    assert module.batch_size == 8
    assert module.steps == 0


@pytest.mark.slow
def test_size_given_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    module = seeded(Unlimited)
    with pytest.raises(InfeasibleBudgetError, match="at batch size 500"):
        search(tmp_path, module, batch_size=500)
    assert module.batch_size == 8


@pytest.mark.slow
def test_on_infeasible_minimum_plans_the_lowest_peak(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="lowest peak"):
        result, _, _ = search(tmp_path, batch_size=64, on_infeasible="minimum")
    assert result.batch_size == 64
    assert result.predicted_peak_bytes > 8 * 2**20


@pytest.mark.slow
def test_batch_norm_at_one_sample_is_a_lower_limit() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
    arguments: dict[str, Any] = {"planner": "periodic", "memory_budget": "1MiB", "max_batch_size": 1}
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        find_batch_size(net, torch.randn(4, 8), lambda x: net(x).sum(), **arguments)
    arguments["max_batch_size"] = 2
    assert find_batch_size(net, torch.randn(4, 8), lambda x: net(x).sum(), **arguments).batch_size == 2


def test_a_loss_that_does_not_call_the_module_is_told() -> None:
    with pytest.raises(ValueError, match=r"loss_of\(batch\) does not call the module \(Linear\)"):
        find_batch_size(torch.nn.Linear(4, 4), torch.randn(2, 4), Tensor.sum, memory_budget="1MiB")


@pytest.mark.slow
def test_measured_above_the_budget_corrects_and_goes_on(tmp_path: Path) -> None:
    """Memory outside the regions that no profile sees is found by executing, and the size goes down."""

    class Hungry(Unlimited):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            held = batch[0].repeat(1, 20, 1, 1).requires_grad_()  # 20 times the batch, kept for its backward
            return super().training_step(batch, batch_idx) + 0 * (held * held).sum()

    result, _, _ = search(tmp_path, seeded(Hungry))
    plain, _, _ = search(tmp_path)
    assert result.measured_peak_bytes is not None
    assert result.measured_peak_bytes <= result.budget_bytes
    assert result.batch_size < plain.batch_size
    assert 2 < result.num_steps <= 6


def find_measured(monkeypatch: pytest.MonkeyPatch, measured: Callable[[int, int], int]) -> Result:
    """What a search within 1 MiB finds where a batch size and the bytes that its step takes are measured so."""

    def measure(self: PlainTrial, batch_size: int, *, with_scratch: bool) -> int:
        return measured(batch_size, true_measure(self, batch_size, with_scratch=with_scratch))

    true_measure = PlainTrial.measure
    monkeypatch.setattr(PlainTrial, "measure", measure)
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Sigmoid()) for _ in range(6)))
    arguments: dict[str, Any] = {"memory_budget": "1MiB", "max_batch_size": 10000}
    result = find_batch_size(net, torch.randn(4, 16), lambda x: net(x).sum(), planner="periodic", **arguments)
    restore(net)
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("part", "constant"), [(0.8, 0), (0.0, 2**19), (0.3, 2**18), (3.0, 0)])
def test_steps_that_need_far_more_than_predicted_end_in_a_size_that_fits(
    monkeypatch: pytest.MonkeyPatch, part: float, constant: int
) -> None:
    """Whether what no profile sees grows with the batch, is the same for all sizes, or both: three tries suffice."""
    result = find_measured(monkeypatch, lambda _, needed: int(needed * (1 + part)) + constant)
    assert result.measured_peak_bytes is not None
    assert 0.4 * result.budget_bytes < result.measured_peak_bytes <= result.budget_bytes
    assert 2 < result.num_steps <= 6


@pytest.mark.slow
def test_after_a_step_that_ran_out_of_memory_the_size_comes_near_to_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(batch_size: int, needed: int) -> int:
        tried.append(batch_size)
        if 1.2 * needed > 2**20:
            raise torch.OutOfMemoryError("out of memory")
        return int(1.2 * needed)

    tried: list[int] = []
    result = find_measured(monkeypatch, measured)
    assert result.batch_size < tried[0], "which ran out of memory"
    assert result.measured_peak_bytes is not None
    assert 0.9 * 2**20 < result.measured_peak_bytes <= 2**20
    assert result.num_steps <= 8


class Data(LightningDataModule):
    """A datamodule without the attribute."""

    def train_dataloader(self) -> Any:
        return DataLoader(Images(2000), batch_size=4, shuffle=True)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        data = Images(400)
        return iter([data[i] for i in range(len(data))])


class OwnLoader(DataLoader[Any]):
    """A subclass with a constructor that Lightning cannot call again."""

    def __init__(self, how_many: int) -> None:
        super().__init__(Images(how_many), batch_size=4, shuffle=True)


class NoLoader(Classifier):
    """Data comes from outside."""

    train_dataloader = None  # pyright: ignore[reportAssignmentType]


def loaders() -> dict[str, dict[str, Any]]:
    images = Images(2000)
    return {
        "direct": {"train_dataloaders": DataLoader(images, batch_size=4, shuffle=True)},
        "batch-sampler": {
            "train_dataloaders": DataLoader(images, batch_sampler=BatchSampler(RandomSampler(images), 4, True))
        },
        "iterable": {"train_dataloaders": DataLoader(Stream(), batch_size=4)},
        "subclass": {"train_dataloaders": OwnLoader(1000)},
        "datamodule": {"datamodule": Data()},
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the training loader ignores the attribute 'batch_size'")
@pytest.mark.parametrize("kind", list(loaders()))
def test_every_loader_gets_the_size(tmp_path: Path, kind: str) -> None:
    module = seeded()
    result, module, _ = search(tmp_path, module, loaders()[kind], batch_size=20)
    assert result.batch_size == 20
    assert module.sizes == [20, 20]


@pytest.mark.slow
def test_ignored_attribute_warns(tmp_path: Path) -> None:
    class Ignoring(Classifier):
        def train_dataloader(self) -> Any:
            return DataLoader(Images(), batch_size=4)

    with pytest.warns(UserWarning, match="ignores the attribute 'batch_size' and yields batches of 4"):
        _, module, _ = search(tmp_path, seeded(Ignoring), batch_size=20)
    assert module.sizes == [20, 20]


@pytest.mark.slow
def test_validation_keeps_its_size_unless_included(tmp_path: Path) -> None:
    seen: dict[bool, set[int]] = {}
    for include in (False, True):
        sizes: set[int] = set()

        class Validating(Unlimited):
            def validation_step(self, batch: Any, batch_idx: int, sizes: set[int] = sizes) -> None:
                sizes.add(len(batch[0]))

        data = DataLoader(Images(40), batch_size=4)
        search(tmp_path, seeded(Validating), {"val_dataloaders": data}, batch_size=20, include_validation=include)
        seen[include] = sizes
    assert seen == {False: {4}, True: {20}}


@pytest.mark.slow
def test_schedulers_count_right_and_hyperparameters_show_the_size(tmp_path: Path) -> None:
    totals: list[int] = []

    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            totals.append(int(self.trainer.estimated_stepping_batches))
            return super().configure_optimizers()

    callback = Rematerialization("periodic", memory_budget="8MiB", batch_size=16)
    logger = CSVLogger(tmp_path)
    run(tmp_path, seeded(Scheduled), callback, logger=logger, max_steps=-1, max_epochs=1)
    assert totals == [4]  # the size is set before anyone counts
    assert "batch_size: 16" in (Path(logger.log_dir) / "hparams.yaml").read_text()


@pytest.mark.slow
def test_learning_rate_finder_comes_after(tmp_path: Path) -> None:
    class Finder(LearningRateFinder):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            assert pl_module.batch_size == 16

    callback = Rematerialization("periodic", memory_budget="8MiB", batch_size=16)
    trainer = run(tmp_path, seeded(), Finder(), callback, max_steps=2)
    kinds: Sequence[type] = [type(c) for c in trainer.callbacks]  # pyright: ignore
    assert kinds.index(Rematerialization) < kinds.index(Finder)


@pytest.mark.slow
@pytest.mark.slow
def test_a_size_whose_calls_do_not_fit_beside_what_planning_keeps_is_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of the machine is counted before the first plan; looking through a step at its size may then fail."""
    look, failed = LightningTrial.look_through, list[int]()

    def exhausted(self: LightningTrial, batch_size: int, modules: Sequence[Any] | None = None) -> Any:
        if modules and not failed:  # to install the first plan
            failed.append(batch_size)
            raise torch.OutOfMemoryError("out of memory")
        return look(self, batch_size, modules)

    monkeypatch.setattr(LightningTrial, "look_through", exhausted)
    result, _, trainer = search(tmp_path, memory_budget=None, batch_size=32)
    assert failed == [32]
    assert result.batch_size == 32
    assert trainer.global_step


@pytest.mark.slow
def test_plain_pytorch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = network()
    optimizer = torch.optim.Adam(net.parameters())
    before = {k: v.clone() for k, v in net.state_dict().items()}
    batch = torch.randn(8, 3, 16, 16), torch.randint(0, 5, (8,))
    images, randoms = batch[0].clone(), torch.get_rng_state()

    def loss_of(batch: Any) -> Tensor:
        return functional.cross_entropy(net(batch[0].mul_(0.9)), batch[1])

    result = find_batch_size(net, batch, loss_of, optimizer, "periodic", memory_budget="8MiB", report_dir=tmp_path)
    assert result.measured_peak_bytes is not None
    assert result.measured_peak_bytes <= result.budget_bytes
    assert torch.equal(torch.get_rng_state(), randoms)
    assert torch.equal(batch[0], images)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert not optimizer.state
    assert "forward" in vars(net)
    assert (tmp_path / "remat_batch_sizes.png").exists()
    restore(net)
    assert "forward" not in vars(net)


@pytest.mark.slow
def test_fabric() -> None:
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    plain = network()
    net, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    batch = torch.randn(8, 3, 16, 16), torch.randint(0, 5, (8,))

    def loss_of(batch: Any) -> Tensor:
        return functional.cross_entropy(net(batch[0]), batch[1])

    result = find_batch_size(
        net,
        batch,
        loss_of,
        optimizer,
        "periodic",
        memory_budget="4MiB",
        precision=fabric.autocast,
        backward=fabric.backward,
    )
    assert result.measured_peak_bytes is not None
    assert result.measured_peak_bytes <= result.budget_bytes
    assert result.plan.num_recomputed > 0
    assert "forward" in vars(plain)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the training loader ignores the attribute 'batch_size'")
def test_loaders_of_one_size_are_all_changed_and_of_several_sizes_refused(tmp_path: Path) -> None:
    class Two(NoLoader):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert len(batch["b"][0]) == len(batch["a"][0])
            return super().training_step(batch["a"], batch_idx)

    def two(other: int) -> dict[str, Any]:
        data = Images(200)
        return {"train_dataloaders": {"a": DataLoader(data, batch_size=4), "b": DataLoader(data, batch_size=other)}}

    module = seeded(Two)
    _, module, _ = search(tmp_path, module, two(4), batch_size=20)
    assert module.sizes == [20, 20]
    with pytest.raises(MisconfigurationException, match="different batch sizes"):
        search(tmp_path, seeded(Two), two(2))
