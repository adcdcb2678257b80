"""The whole way on a device that is not the host: callback, search, memory that runs out, resuming, random states.

For any device; what only the device of the tests can tell is in `test_ledger.py`.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from accelerator import ledger
from accelerator.lightning_device import on_device
from diary import Diary
from lightning.pytorch import Callback
from remat_runs import Classifier, Unlimited, network, run, seeded
from same_runs import Deep, assert_same_run, remat, samples
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training_steps import assert_equal_traces, traces

from lightning_remat import Rematerialization, find_batch_size, profile, rematerialize, trace
from lightning_remat.devices import allocated_bytes, memory_info, most_bytes, random_state, start_counting
from lightning_remat.measure.device_memory import device_memory
from lightning_remat.measure.tensor_bytes import storage_bytes
from lightning_remat.reports.report import format_table, result_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]

MIB = 2**20
ROUNDING_BYTES = 512


@contextmanager
def limited(device: torch.device, count: int) -> Iterator[None]:
    """The device has that many bytes for this process, and what tests before have left is gone."""
    gc.collect()
    torch.accelerator.empty_cache()
    if device.type == ledger.NAME:
        ledger.set_limit(count)
    else:
        torch.cuda.set_per_process_memory_fraction(count / torch.cuda.get_device_properties(device).total_memory)
    try:
        yield
    finally:
        if device.type == ledger.NAME:
            ledger.set_limit(ledger.UNLIMITED)
        else:
            torch.cuda.set_per_process_memory_fraction(1.0)


class Larger(Deep):
    """Activations outweigh the blocks' rounding, and the other model that is alive while results are compared."""

    batch_size = 1024

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(samples(4 * self.batch_size), batch_size=self.batch_size, shuffle=True)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_leaves_what_the_plain_run_leaves(accelerator: torch.device, tmp_path: Path, precision: str) -> None:
    """Weights, metrics, optimizers, and the random states of host and device."""
    assert_same_run(tmp_path, Larger, where=lambda: on_device(accelerator, precision))


class Peaks(Callback):
    """What the allocator counted in each step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.found = device, list[int]()

    def on_train_batch_start(self, *_: Any) -> None:
        start_counting(self.device)

    def on_train_batch_end(self, *_: Any) -> None:
        self.found.append(most_bytes(self.device))


def test_the_measured_peak_is_the_allocators(accelerator: torch.device, tmp_path: Path) -> None:
    gc.collect()
    callback, peaks = Rematerialization("periodic", memory_budget="70%", batch_size="keep"), Peaks(accelerator)
    run(tmp_path, seeded(Classifier, net=network(width=32)), peaks, callback, **on_device(accelerator))
    result = callback.result
    assert result is not None
    assert result.step.num_recomputed
    assert result.measured_peak_bytes is not None
    assert result.measured_peak_bytes % ROUNDING_BYTES == 0
    assert max(peaks.found) <= result.budget_bytes
    assert max(peaks.found) == pytest.approx(result.measured_peak_bytes, rel=0.02)


def test_a_search_fills_a_device_and_training_stays_within_it(accelerator: torch.device, tmp_path: Path) -> None:
    """The budget is what the device has; the size is one that the plain step could not have."""
    limit = (64 if accelerator.type == ledger.NAME else 512) * MIB
    with limited(accelerator, limit):
        total = device_memory(accelerator).total_bytes
        assert total <= limit
        callback = Rematerialization("periodic", max_batch_size=2000)
        module = seeded(Unlimited)
        run(tmp_path, module, callback, max_steps=4, **on_device(accelerator))
        result = callback.result
        assert result is not None
        assert result.budget_bytes <= total
        assert result.measured_peak_bytes is not None
        assert result.measured_peak_bytes <= result.budget_bytes
        assert result.plain_peak_bytes > total
        assert module.sizes == [result.batch_size] * 4


class Hungry(Classifier):
    """Asks for more than the device has, once, in its third step, after random numbers were drawn."""

    asks: ClassVar = Diary[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.asks.take(batch_idx):
            self.too_much = torch.empty(memory_info(self.device)[1] + MIB, dtype=torch.uint8, device=self.device)
        return loss


def test_a_step_that_runs_out_of_memory_is_run_again_by_a_tighter_plan(
    accelerator: torch.device, tmp_path: Path
) -> None:
    found: list[dict[str, Any]] = []
    for asks in ([], [2]):
        for batch_idx in asks:
            Hungry.asks.add(batch_idx)
        callback = Rematerialization("periodic", memory_budget="85%", batch_size="keep", on_oom="replan")
        module = seeded(Hungry)
        with limited(accelerator, 256 * MIB):
            if asks:
                with pytest.warns(UserWarning, match="is run again by a tighter plan"):
                    run(tmp_path, module, callback, **on_device(accelerator))
            else:
                run(tmp_path, module, callback, **on_device(accelerator))
        assert module.steps == 4
        found.append({**module.state_dict(), "host": torch.rand(3), "device": torch.rand(3, device=accelerator)})
    plain, again = found
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_a_resumed_run_goes_on_with_the_stored_plan(
    accelerator: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lightning_remat.trainer.planning as planning_module

    options = {"memory_budget": "70%", "batch_size": "keep"}
    first, module = Rematerialization("periodic", **options), seeded()
    trainer = run(tmp_path, module, first, max_steps=-1, max_epochs=1, **on_device(accelerator))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    assert first.result is not None
    schedule = first.result.plan.schedule
    del trainer, module, first
    gc.collect()  # what the first run holds would count in the second
    monkeypatch.setattr(planning_module, "find", lambda *a: pytest.fail("searched again"))
    second, module = Rematerialization("periodic", **options), seeded()
    fit = {"ckpt_path": tmp_path / "run.ckpt"}
    trainer = run(tmp_path, module, second, max_steps=-1, max_epochs=2, fit=fit, **on_device(accelerator))
    assert trainer.global_step == 16
    assert module.steps == 8
    assert second.result is not None
    assert second.result.plan.schedule == schedule


def test_a_profile_counts_the_same_bytes_every_time(accelerator: torch.device) -> None:
    """What autograd's thread still holds of the backward before is no part of what is measured next."""
    module, x = network(width=16).to(accelerator), torch.randn(64, 3, 32, 32, device=accelerator)
    traced = trace(module, x)
    first, *others = (profile(traced, x, repeats=1) for _ in range(12))
    assert all(graph.with_seconds_of(first) == first for graph in others)


@pytest.mark.parametrize("budget", ["100%", "70%", "50%"])
def test_what_is_told_of_an_allocator_is_what_it_allocates_and_reserves(accelerator: torch.device, budget: str) -> None:
    gc.collect()
    torch.accelerator.empty_cache()  # of what other tests have left
    torch.manual_seed(0)
    module, optimizers = network(width=16).to(accelerator), list[torch.optim.Optimizer]()
    optimizers.append(torch.optim.SGD(module.parameters(), 0.1, momentum=0.9))
    batch = torch.randn(64, 3, 32, 32, device=accelerator), torch.randint(0, 4, (64,), device=accelerator)

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    found = find_batch_size(module, batch, loss_of, optimizers, "periodic", memory_budget=budget, batch_size="keep")
    assert found.reserved_bytes is not None
    assert "reserved by the allocator" in format_table(result_table(found))
    gc.collect()
    torch.accelerator.empty_cache()
    before = allocated_bytes(accelerator) - storage_bytes([*module.parameters(), *module.buffers(), *batch])
    start_counting(accelerator)
    for _ in range(3):
        loss_of(batch).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    assert most_bytes(accelerator) - before == pytest.approx(found.predicted_peak_bytes, rel=0.01)
    assert most_bytes(accelerator, reserved=True) == pytest.approx(found.reserved_bytes, rel=0.05)


class OnBoth(nn.Module):
    """Begins on the host and goes on elsewhere, with dropout on either side."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.embedding = nn.Embedding(50, 64)
        self.drop = nn.Dropout(0.2)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.2)) for _ in range(6)))
        self.body.to(device)

    def forward(self, words: Tensor) -> Tensor:
        return self.body(self.drop(self.embedding(words)).to(self.device))


def device_traces(module: nn.Module, batches: list[Tensor], device: torch.device) -> dict[str, Tensor]:
    return {**traces(module, batches), "device": random_state(device)}


def test_a_module_on_host_and_device(accelerator: torch.device) -> None:
    torch.manual_seed(0)
    plain = OnBoth(accelerator)
    ours = copy.deepcopy(plain)
    batches = [torch.randint(0, 50, (32, 8)) for _ in range(2)]
    before = torch.get_rng_state(), random_state(accelerator)
    made = rematerialize(ours, batches[0], memory_budget="80%", planner="periodic")
    assert all(map(torch.equal, before, (torch.get_rng_state(), random_state(accelerator))))
    assert made.num_recomputed
    assert_equal_traces(device_traces(plain, batches, accelerator), device_traces(ours, batches, accelerator))


class Halves(nn.Module):
    """One half on each device."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.halves = nn.ModuleList(nn.Sequential(*(OneLayer() for _ in range(4))).to(device) for device in devices)

    def forward(self, x: Tensor) -> Tensor:
        for device, half in zip(self.devices, self.halves, strict=True):
            x = half(x.to(device))
        return x


class OneLayer(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.2))


def test_a_module_on_two_devices(accelerator: torch.device) -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    devices = [torch.device(accelerator.type, n) for n in range(2)]
    torch.manual_seed(0)
    plain = Halves(devices)
    ours = copy.deepcopy(plain)
    batches = [torch.randn(256, 64, device=devices[0]) for _ in range(2)]
    made = rematerialize(ours, batches[0], memory_budget="80%", planner="periodic")
    assert made.num_recomputed
    expected, found = (
        {**device_traces(m, batches, devices[1]), "first": random_state(devices[0])} for m in (plain, ours)
    )
    assert_equal_traces(expected, found)


def test_a_module_that_is_gone_leaves_nothing_on_the_device(accelerator: torch.device) -> None:
    gc.collect()
    before = allocated_bytes(accelerator)
    module, x = network(width=32).to(accelerator), torch.randn(4, 3, 16, 16, device=accelerator)
    rematerialize(module, x, memory_budget="70%", planner="periodic")
    module(x).square().sum().backward()
    assert allocated_bytes(accelerator) > before
    del module, x
    gc.collect()
    assert allocated_bytes(accelerator) == before


def test_self_check_compares_the_devices_random_state(accelerator: torch.device, tmp_path: Path) -> None:
    assert_same_run(tmp_path, Larger, callback=remat(self_check=True), where=lambda: on_device(accelerator))
