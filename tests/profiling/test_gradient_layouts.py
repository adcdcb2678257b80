"""A gradient that comes transposed is copied by the backward of a linear layer, and the copy is in the prediction."""

import pytest
import torch
from rewriting import rewrite
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from training_steps import step_peak

from benchmarks.peaks import LOSS_BYTES
from lightning_remat import plan, profile, rematerialize, simulate, trace
from lightning_remat.capture.tracer import capture_call
from lightning_remat.lowering import lower_kept
from lightning_remat.profiling.layouts import gradient_layouts


class MixesTokens(nn.Module):
    """One block of an MLP-Mixer: the second layer's gradient comes transposed from the sum with the input."""

    def __init__(self, num_tokens: int = 12, num_channels: int = 10) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(num_channels, num_channels), nn.Linear(num_channels, 3)
        self.into, self.out = nn.Linear(num_tokens, 64), nn.Linear(64, num_tokens)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        y = y + self.out(nn.functional.gelu(self.into(y.transpose(1, 2)))).transpose(1, 2)
        return self.last(y.tanh())


@pytest.mark.slow
@pytest.mark.parametrize("kept", [(), (1,), (0, 2)])
def test_a_copy_of_a_transposed_gradient_is_predicted(kept: tuple[int, ...]) -> None:
    module, x = MixesTokens(), torch.randn(64, 12, 10)
    graph = profile(trace(module, x), x, repeats=1)
    chosen = {*kept, len(graph.nodes) - 1}
    rewrite(module, chosen, x)
    planned = simulate(graph, lower_kept(graph, chosen))
    # The copy, of 30 KiB, has gone when the last bias gets its gradient, of 48 bytes.
    assert step_peak(module, x) - LOSS_BYTES == pytest.approx(planned.peak_bytes, abs=48)


@pytest.mark.slow
@pytest.mark.parametrize("swaps", [False, True])
def test_a_transposed_gradient_does_not_pass_a_change_of_shape_as_a_view(swaps: bool) -> None:
    middle = [nn.Unflatten(1, (8, 8)), *[Swapped()] * swaps]
    module, x = nn.Sequential(nn.Linear(8, 64), *middle, nn.Linear(8, 3)), torch.randn(4, 8)
    nodes = {n.kind: n for n in profile(trace(module, x), x, repeats=1).nodes}
    assert nodes["unflatten"].shares_gradient == (() if swaps else (0,))


class Swapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(-1, -2)


@pytest.mark.slow
@pytest.mark.parametrize("is_fake", [False, True])
def test_gradients_that_do_not_lie_as_their_tensors(is_fake: bool) -> None:
    with FakeTensorMode() if is_fake else torch.enable_grad():
        module, x = MixesTokens(), torch.randn(4, 12, 10)
        traced, values = capture_call(module, (x,), {})
        found = gradient_layouts(traced, values)
        assert all(p.grad is None and type(p) is nn.Parameter for p in module.parameters()) or is_fake
    names = {traced.operations[n].name: strides for n, strides in found.items()}
    # The sum gives both terms the same gradient, of shape [4, 12, 10]; one of them is a transposed [4, 10, 12].
    assert names["out"] == {0: (120, 1, 10)}
    assert "into" not in names


class WritesLater(MixesTokens):
    """What is written in place runs after what asks for another size, later."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        ones = torch.ones(y.size())
        z = x.sin()
        y.add_(torch.ones(z.size()))
        return super().forward(y * ones)


@pytest.mark.slow
def test_sizes_become_known_in_the_order_in_which_operations_run() -> None:
    module = WritesLater(12, 10)
    traced, values = capture_call(module, (torch.randn(4, 12, 10),), {})
    assert [traced.producer[n.all_input_nodes[0]] for n in traced.constants] == [2, 0]
    assert gradient_layouts(traced, values)


def test_nothing_is_run_where_nothing_is_permuted(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.Sequential(nn.Linear(6, 6), nn.Flatten(0), nn.Tanh()), torch.randn(2, 6)
    monkeypatch.setattr("lightning_remat.profiling.layouts.fake_values", None)
    assert gradient_layouts(*capture_call(module, (x,), {})) == {}


class ChannelsLast(nn.Module):
    """The weight's gradient comes with the channels last; PyTorch copies it into the weight's own order."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(16), nn.Conv2d(16, 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(x).permute(0, 3, 1, 2))


def test_a_gradient_that_is_copied_into_its_parameters_order_counts_twice() -> None:
    module, x = ChannelsLast(), torch.randn(1, 4, 4, 16)
    graph = profile(trace(module, x), x, repeats=1)
    plain = plan(graph, 1 << 62, "keep_all")
    measured = step_peak(module, x) - LOSS_BYTES
    # PyTorch lets go of the output, and of what a backward has read, before that.
    assert measured <= plain.peak_bytes <= measured + module(x).nbytes + x.nbytes
    weight_bytes = module.conv.weight.nbytes
    assert graph.nodes[-1].parameter_bytes == weight_bytes + module.conv.bias.nbytes  # pyright: ignore
    assert measured > 3 * weight_bytes
    made = rematerialize(module, x, memory_budget=plain.peak_bytes, planner="periodic")
    assert made.plain.peak_bytes == measured


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_values_that_nobody_has_are_not_looked_at_for_anomalies() -> None:
    module, x = MixesTokens(), torch.randn(4, 12, 10)
    call = capture_call(module, (x,), {})
    with torch.autograd.detect_anomaly():
        found = gradient_layouts(*call)
    assert found == gradient_layouts(*call) != {}
