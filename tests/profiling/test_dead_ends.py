"""What gradients could flow to and do not: a plain step lets go of it when its forward has ended, and so does ours."""

import copy

import pytest
import torch
from rewriting import recomputing_copy
from torch import Tensor, nn
from training_steps import assert_equal_traces, step_peak, traces

from lightning_remat import TraceError, profile, rematerialize, simulate, trace
from lightning_remat.lowering import lower_kept

X = torch.randn(256, 16)


class Choosing(nn.Module):
    """Layers between which rows are chosen by what wide activations say, without `no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.score = nn.Linear(16, 128)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q = layer(x)
            best = torch.sigmoid(self.score(q)).exp_().sum(-1).topk(8, sorted=False)[1]
            x = torch.tanh(q) + q[best].mean(0)
        return x


class Quantized(nn.Module):
    """Nearest entries of a codebook, passed straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 16), nn.Linear(16, 16)
        self.codebook = nn.Embedding(64, 16)
        self.register_buffer("uses", torch.zeros(64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x).tanh()
        distances = z.square().sum(1, keepdim=True) - 2 * z @ self.codebook.weight.t()
        nearest = nn.functional.dropout(distances + self.codebook.weight.square().sum(1), 0.1).argmin(1)
        self.uses += nn.functional.one_hot(nearest, 64).sum(0)
        quantized = self.codebook(nearest)
        return self.decode(z + (quantized - z).detach()), (quantized - z.detach()).square().mean()


@pytest.mark.slow
def test_nothing_is_kept_for_a_backward_that_never_comes() -> None:
    module = Choosing()
    graph = profile(trace(module, X), X)
    score = next(n for n in graph.nodes if n.name == "score")
    assert (score.saved, score.tape_bytes, score.gradient_bytes, score.parameter_bytes) == ((), 0, 0, 0)
    kept = simulate(graph, lower_kept(graph, range(len(graph.nodes)))).peak_bytes
    assert kept == pytest.approx(step_peak(module, X), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Choosing, Quantized])
def test_steps_are_the_same_in_every_bit(kind: type[nn.Module]) -> None:
    module = kind()
    ours = recomputing_copy(module, X)
    assert_equal_traces(traces(module, [X, X]), traces(ours, [X, X]))


@pytest.mark.slow
@pytest.mark.parametrize("share", ["90%", "80%"])
def test_a_budget_below_what_plain_takes_is_kept(share: str) -> None:
    module = Choosing()
    plain, ours = step_peak(module, X), copy.deepcopy(module)
    plan = rematerialize(ours, X, memory_budget=share)
    assert step_peak(ours, X) <= plan.budget_bytes <= float(share[:-1]) / 100 * plain + 1
    assert_equal_traces(traces(module, [X, X]), traces(ours, [X, X]))


def test_gradients_asked_for_within_a_captured_forward_are_refused() -> None:
    class Penalized(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * torch.autograd.grad(y.tanh().sum(), y)[0]

    message = r"torch\.autograd\.grad within its forward.*test_dead_ends\.py"
    with torch._dynamo.config.patch(trace_autograd_ops=True), pytest.raises(TraceError, match=message):
        trace(Penalized(16, 16), X)
