"""The promises on each device: the same code on the CPU, on CUDA where there is one, and on the device of the tests.

On devices peaks are the allocator's. Its blocks are rounded up to 512 bytes and CUDA's libraries' workspaces change
with the algorithm that they choose, so bytes are compared within 2 % and 2 MiB there; gradients are bitwise equal under
deterministic algorithms and without TF32.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from accelerator.lightning_device import on_device
from remat_runs import Unlimited, network, run, seeded
from torch import Tensor, nn
from training_steps import assert_equal_traces, loss_of, step_peak, traces

from lightning_remat import Rematerialization, find_batch_size, measure_peak, rematerialize, restore

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]

TOLERANCE_BYTES = {"cpu": 0, "cuda": 2 * 2**20, "ledger": 2**16}


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A device whose results repeat."""
    allows_tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        device = torch.device("cpu") if request.param == "cpu" else request.getfixturevalue(request.param)
        torch.use_deterministic_algorithms(device.type == "cuda")
        if device.type != "cpu":
            gc.collect()  # the allocator counts what earlier tests have left
        yield device
    torch.use_deterministic_algorithms(was_deterministic)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = allows_tf32


class Attention(nn.Module):
    """A block whose attention draws random numbers inside its kernel."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.attend(self.norm(x)).transpose(1, 2).flatten(2))

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1 if self.training else 0.0)


def transformer() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(Attention(), nn.Linear(64, 64), nn.GELU()) for _ in range(4)))


NETWORKS = {"convolutions": (lambda: network(width=32), (3, 16, 16)), "attention": (transformer, (32, 64))}
BATCH_SIZES = {"cpu": 4, "cuda": 128, "ledger": 4}  # on CUDA activations must outweigh rounding and workspaces


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_three_steps_are_bitwise_equal(device: torch.device, name: str, precision: str) -> None:
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    plain = build().to(device)
    ours = copy.deepcopy(plain)
    batches = [torch.randn(BATCH_SIZES[device.type], *shape, device=device) for _ in range(3)]
    autocast = nullcontext() if precision == "float32" else torch.autocast(device.type, torch.bfloat16)
    with autocast:
        made = rematerialize(ours, batches[0], memory_budget="60%", planner="periodic")
    assert made.num_recomputed > 0

    def step(module: nn.Module, batch: Tensor) -> Tensor:
        with autocast:
            loss = loss_of(module(batch))
        loss.backward()
        return loss

    assert_equal_traces(traces(plain, batches, step=step), traces(ours, batches, step=step))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_measured_peaks_are_the_predicted_ones(device: torch.device, name: str) -> None:
    build, shape = NETWORKS[name]
    module, x = build().to(device), torch.randn(BATCH_SIZES[device.type], *shape, device=device)
    tolerance_bytes = TOLERANCE_BYTES[device.type]
    for budget in ("100%", "60%"):
        made = rematerialize(module, x, memory_budget=budget, planner="periodic")
        step_peak(module, x, device=device)  # the first step may choose algorithms
        measured = step_peak(module, x, device=device)
        assert measured == pytest.approx(made.peak_bytes, rel=0.02, abs=tolerance_bytes)
        assert measured <= 1.0001 * made.budget_bytes + tolerance_bytes
        restore(module)


@pytest.mark.slow
def test_the_callback_finds_a_batch_size_that_fits(device: torch.device, tmp_path: Path) -> None:
    budget_bytes = (128 if device.type == "cuda" else 8) * 2**20
    callback = Rematerialization("periodic", memory_budget=budget_bytes, max_batch_size=1000)
    module = seeded(Unlimited)
    run(tmp_path, module, callback, max_steps=2, **on_device(device))
    result = callback.result
    assert result is not None
    assert result.measured_peak_bytes is not None
    assert result.measured_peak_bytes <= budget_bytes
    assert result.num_steps <= 6
    assert result.batch_size > max(c.batch_size for c in result.trials if c.plain_peak_bytes <= budget_bytes)
    assert module.sizes == [result.batch_size] * 2


@pytest.mark.slow
def test_a_size_found_without_a_trainer_trains_within_the_budget(device: torch.device) -> None:
    budget_bytes = (128 if device.type == "cuda" else 8) * 2**20
    torch.manual_seed(0)
    module = network(width=32).to(device)
    optimizer = torch.optim.Adam(module.parameters())
    batch = torch.randn(8, 3, 16, 16, device=device)
    found = find_batch_size(
        module, batch, lambda x: module(x).square().mean(), optimizer, "periodic", memory_budget=budget_bytes
    )
    batch = torch.randn(found.batch_size, 3, 16, 16, device=device)
    for _ in range(2):
        optimizer.zero_grad()
        with measure_peak(device, [module, batch]) as measured:
            module(batch).square().mean().backward()
            optimizer.step()
        assert measured.peak_bytes <= budget_bytes


@pytest.mark.slow
def test_seconds_are_those_of_the_device(device: torch.device) -> None:
    """A plan made on the device estimates its step from what the operations took there."""
    module, x = network().to(device), torch.randn(8, 3, 16, 16, device=device)
    made = rematerialize(module, x, memory_budget="60%", planner="periodic")
    assert all(node.forward_seconds > 0 for node in made.graph.nodes if node.output_bytes and node.storage_of is None)
    assert 0 < made.recompute_overhead < 1
