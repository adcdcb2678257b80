"""What kernels allocate inside themselves is in a profile that asks for it: predicted is allocated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from remat_runs import network
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from benchmarks.predicted_allocated import allocated_peak, measure_allocated_growth
from lightning_remat import InfeasibleBudgetError, Plan, plan, profile, rematerialize, restore, trace


def test_the_allocators_growth_is_counted_and_what_dies_is_not() -> None:
    with measure_allocated_growth() as measured:
        for _ in range(3):
            x = torch.zeros(256)
            del x
        y = torch.zeros(256)
        z = y + 1
    scalars = 64  # that operations make of numbers
    assert 0 <= measured.peak_bytes - (y.nbytes + z.nbytes) <= scalars


def test_what_a_kernel_allocates_inside_itself_is_seen() -> None:
    """A convolution copies an operand that does not lie in order, of which no operation tells."""
    x = torch.randn(64, 32, 8).transpose(0, 2)
    with measure_allocated_growth() as measured:
        y = functional.conv2d(x[None], torch.ones(1, 8, 3, 3))
    assert measured.peak_bytes > y.nbytes


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def lowest(graph: object) -> int:
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(graph, 1, "periodic")  # pyright: ignore
    return int(caught.value.minimum_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "shape"), [(lambda: network(32), (16, 3, 32, 32)), (Attention, (16, 64, 32))], ids=["conv", "attention"]
)
def test_predicted_is_allocated(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape)
    graph = profile(trace(module, x), x, repeats=1, with_kernels=True)
    plain = plan(graph, 1 << 62, "keep_all")
    made: list[Plan] = [plain, plan(graph, lowest(graph), "periodic")]
    for one in made:
        if one is not plain:
            rematerialize(module, x, plan=one)
        allocated = allocated_peak(module, x)
        # Before and after each operation that draws, its generator's state is kept for the recomputation.
        states = 0 if one is plain else 2 * torch.get_rng_state().nbytes * sum(n.is_random for n in graph.nodes)
        assert allocated - states == pytest.approx(one.peak_bytes, rel=0.01)
        restore(module)


@pytest.mark.slow
def test_beside_another_profiler_it_is_not_counted_and_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    module, x = network(), torch.randn(4, 3, 16, 16)
    traced = trace(module, x)
    known = profile(traced, x, repeats=1, with_kernels=False)
    with torch.profiler.profile(), caplog.at_level("INFO", "lightning_remat"):
        found = profile(traced, x, repeats=1)
        made = rematerialize(module, x, memory_budget="85%", planner="periodic")
    assert found.with_seconds_of(known) == known
    assert made.num_recomputed
    assert "a profiler is running" in caplog.text


@pytest.mark.slow
def test_on_fake_tensors_nobody_can_tell() -> None:
    """The profile is the same: what kernels allocate is no part of it."""
    with FakeTensorMode():
        module, x = network(), torch.randn(4, 3, 16, 16)
        traced = trace(module, x)
        assert profile(traced, x, with_kernels=True) == profile(traced, x)
