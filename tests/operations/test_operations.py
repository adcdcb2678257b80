"""Operations that make recomputation hard: each is bitwise equal to plain autograd, whatever is kept."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from rewriting import Between, assert_equal_steps, recomputing_copy, rematerialized_copy, rewrite, step_on_all_outputs
from torch import Tensor, nn
from torch.nn import functional as F
from training_steps import assert_equal_traces, traces

from lightning_remat import TraceError, trace

X = torch.randn(8, 6)
IMAGES = torch.randn(4, 6, 5, 5)


def in_place_on_a_slice(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:3] = x[:, 3:5].exp()
    y[0] += 1
    return y.tanh()


def in_place_on_a_view(x: Tensor) -> Tensor:
    y = x * 2
    y.view(-1, 3, 2)[:, 0].mul_(0.5)
    y.t()[0].add_(x[:, 1])
    return y * x


def in_place_on_an_output(x: Tensor) -> Tensor:
    y = F.relu_(x - 0.5)
    z = (y * 2).add_(x)
    return F.dropout(z, 0.2, inplace=True).sigmoid() + y


def copied_into(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y.copy_(x.exp())
    y.masked_fill_(x > 0.6, 0.0)
    y.index_add_(0, torch.arange(2), x[:2])
    return y * x


def parts(x: Tensor) -> Tensor:
    a, b, c = x.chunk(3, dim=1)
    d, e = x.split([2, 4], dim=1)
    rows = x.unbind(0)
    return torch.cat([a * c, b.sin(), d.exp() * e[:, :2]], dim=1) + rows[0] * rows[-1]


def in_place_on_parts_of_a_copy(x: Tensor) -> Tensor:
    a, b = x.exp().chunk(2, dim=1)
    a, b = a.clone(), b.clone()
    a.add_(b)
    return torch.cat([a.sin(), b], dim=1)


def several_outputs(x: Tensor) -> Tensor:
    values, indices = x.topk(3, dim=1)
    ordered, _ = x.sort(dim=1)
    largest, where = x.max(dim=0)
    variance, mean = torch.var_mean(x, dim=1, keepdim=True)
    gathered = x.gather(1, indices) * values
    return (torch.cat([gathered, ordered[:, :3] * largest[:3]], dim=1) - mean) / variance + where.float()


def complex_numbers(x: Tensor) -> Tensor:
    z = torch.fft.fft(x, dim=1)
    w = z * z.conj() + torch.view_as_complex(x.view(-1, 3, 2).contiguous()).abs().mean()
    return torch.fft.ifft(w.sin() * torch.polar(x.abs(), x), dim=1).real + z.imag


def integers(x: Tensor) -> Tensor:
    codes = (x * 4).long()
    table = F.one_hot(codes.clamp(0, 5)[:, 0], 6)
    return x * table + x[codes[:, 1] % 8].tanh() * (codes > 2)


def indexed(x: Tensor) -> Tensor:
    return torch.where(x > 0.5, x.exp(), x.sin())[torch.tensor([1, 1, 0, 5, 2, 2, 7, 3])] * x[:, [0, 0, 1, 2, 2, 5]]


def expanded(x: Tensor) -> Tensor:
    return (x.mean(0).expand(8, 6) * x).as_strided((8, 6), (6, 1)).flip(0).roll(1).unfold(1, 6, 1).squeeze(1).sigmoid()


PLAIN = [
    in_place_on_a_slice, in_place_on_a_view, in_place_on_an_output, copied_into, parts, in_place_on_parts_of_a_copy,
    several_outputs, complex_numbers, integers, indexed, expanded,
]  # fmt: skip


def attention_with_dropout(x: Tensor) -> Tensor:
    q = x.view(2, 4, 6)
    return F.scaled_dot_product_attention(q, q.exp(), q.sin(), dropout_p=0.3).reshape(8, 6)


def noise(x: Tensor) -> Tensor:
    y = x * torch.rand_like(x) + torch.randn_like(x[0])
    y = y + torch.empty_like(x).uniform_() * torch.bernoulli(x.detach())
    return y * torch.randint_like(x, 1, 3) + torch.normal(x, 0.1)


def random_activations(x: Tensor) -> Tensor:
    y = F.rrelu(x - 0.5, training=True) + F.alpha_dropout(x, 0.2, training=True)
    return y * F.feature_alpha_dropout(x, 0.2, training=True) + F.gumbel_softmax(x, dim=1)


def stochastic_depth(x: Tensor) -> Tensor:
    keep = x.new_empty((x.shape[0], 1)).bernoulli_(0.7)
    return x + x.exp() * keep / 0.7


RANDOM = [attention_with_dropout, noise, random_activations, stochastic_depth]


@pytest.mark.sampled
@pytest.mark.parametrize("does", [*PLAIN, *RANDOM])
def test_functions(does: Callable[[Tensor], Tensor]) -> None:
    assert_equal_steps(Between(does), X, kept=[(), (1,), (1, 3)])


@pytest.mark.parametrize("split", [lambda x: x.chunk(2, 1), lambda x: x.split(3, 1)])
def test_in_place_on_a_part_is_the_plain_error(split: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    def does(x: Tensor) -> Tensor:
        a, b = split(x)
        a.mul_(2)
        return torch.cat([a, b], dim=1)

    module = Between(does)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        module(X)
    with pytest.raises(TraceError, match="is a view and is being modified inplace"):
        recomputing_copy(module, X)


class Twice(nn.Module):
    """Shared submodules and parameters, called several times and tied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.layer.weight
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.norm(self.layer(x)).sigmoid() * self.scale
        return self.tied(x) * self.scale + F.linear(x, self.layer.weight)


class Recurrent(nn.Module):
    """The state of a cell through an unrolled loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h, c = torch.zeros_like(x), torch.zeros_like(x)
        for _ in range(4):
            h, c = self.cell(x, (h, c))
            x = self.head(h).tanh()
        return x + c


def frozen_norm() -> nn.Module:
    norm = nn.BatchNorm2d(6)
    norm.running_mean.fill_(0.2)  # type: ignore[union-attr]
    norm.eval().requires_grad_(False)
    return norm


def image_layers(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), layer, nn.ReLU(inplace=True), nn.Conv2d(6, 6, 1), nn.Sigmoid())


def old_spectral_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.spectral_norm(nn.Conv2d(6, 6, 3, padding=1))


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Conv2d(6, 6, 3, padding=1))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch-norm": lambda: nn.BatchNorm2d(6),
    "batch-norm-untracked": lambda: nn.BatchNorm2d(6, track_running_stats=False),
    "batch-norm-frozen": frozen_norm,
    "sync-batch-norm": lambda: nn.SyncBatchNorm(6),
    "instance-norm": lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
    "spectral-norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(6, 6, 3, padding=1)),
    "spectral-norm-old": old_spectral_norm,
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 6, 3, padding=1)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Conv2d(6, 6, 1)),
    "dropout": lambda: nn.Dropout(0.3),
    "dropout2d": lambda: nn.Dropout2d(0.3),
    "alpha-dropout": lambda: nn.AlphaDropout(0.3),
    "feature-alpha-dropout": lambda: nn.FeatureAlphaDropout(0.3),
    "rrelu": nn.RReLU,
    "fractional-pool": lambda: nn.FractionalMaxPool2d(2, output_size=4),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    assert_equal_steps(image_layers(LAYERS[name]()), IMAGES, kept=[(), (0,), (1,)])


@pytest.mark.slow
def test_a_cumulative_norm_that_reads_its_counter_takes_the_graph_apart() -> None:
    wide = nn.Sequential(nn.Linear(6, 6), *(nn.Sigmoid() for _ in range(4)))
    plain, x = nn.Sequential(wide, nn.BatchNorm1d(6, momentum=None), copy.deepcopy(wide)), torch.randn(256, 6)
    ours = rematerialized_copy(plain, x)
    assert_equal_traces(traces(plain, [x] * 3), traces(ours, [x] * 3))


def test_the_old_weight_norm_which_cannot_be_copied() -> None:
    found = []
    for is_ours in (False, True):
        torch.manual_seed(3)
        module = image_layers(old_weight_norm())
        if is_ours:
            rewrite(module, (), IMAGES)
        found.append(traces(module, [(IMAGES,)] * 3, step=step_on_all_outputs))
    assert_equal_traces(*found)


@pytest.mark.slow
@pytest.mark.parametrize("module", [Twice(), Recurrent(), nn.Sequential(nn.LSTM(6, 6, 2, dropout=0.3))])
def test_shared_parts_and_recurrences(module: nn.Module) -> None:
    x = X if not isinstance(module, nn.Sequential) else X.view(2, 4, 6)
    assert_equal_steps(module, x, kept=[(), (1,), (1, 4)])


@pytest.mark.slow
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_layers(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.2, norm_first=norm_first, batch_first=True)
    module = nn.Sequential(nn.Linear(6, 6), layer, copy.deepcopy(layer))
    assert_equal_steps(module, X.view(2, 4, 6))


class Bag(nn.Module):
    """Sparse gradients of an embedding, and integer inputs."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, sparse=sparse)
        self.bag = nn.EmbeddingBag(20, 6, sparse=sparse, mode="sum")
        self.head = nn.Linear(6, 6)

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.table(codes).sigmoid().sum(1) * self.bag(codes)).sigmoid()


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings(sparse: bool) -> None:
    codes = torch.randint(0, 20, (8, 5))
    plain = Bag(sparse)
    for kept in ((), (1,), (3,)):
        ours = recomputing_copy(plain, codes, kept=kept)
        found = []
        for module in (copy.deepcopy(plain), ours):
            module(codes).square().sum().backward()
            assert module.table.weight.grad.is_sparse == sparse
            found.append([p.grad.to_dense() for p in module.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class HostNoise(nn.Module):
    """Decides by Python's and numpy's generators, and by values."""

    def forward(self, x: Tensor) -> Tensor:
        if x.detach().sum() > -1e9 and random.random() < 2:
            x = x * random.uniform(0.5, 1.5)
        return (x + float(np.random.rand())).sigmoid()  # noqa: NPY002


class RareBranch(nn.Module):
    """What a trace cannot see: on the second call it drops values at random and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.calls.item() > 0:
            x = F.dropout(x, 0.5) * self.calls.item()
        if x.abs().sum() > 0:
            self.calls += 1
        return x.sigmoid()


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        HostNoise,
        RareBranch,
    ],
)
def test_parts_that_decide_by_values_run_as_they_are(part: type[nn.Module]) -> None:
    x = torch.randn(256, 6)
    wide = nn.Sequential(nn.Linear(6, 6), *(nn.Sigmoid() for _ in range(4)))
    module = nn.Sequential(wide, part(), copy.deepcopy(wide), part(), copy.deepcopy(wide))

    def step(m: nn.Module, args: tuple[Tensor]) -> Tensor:
        if m.training and not hasattr(m, "seeded"):
            m.seeded = True
            random.seed(5)
            np.random.seed(5)  # noqa: NPY002
        return step_on_all_outputs(m, args)

    ours = rematerialized_copy(module, x)
    after = [
        [traces(m, [(x,)] * 3, step=step), random.random(), float(np.random.rand())]  # noqa: NPY002
        for m in (module, ours)
    ]
    assert_equal_traces(after[0][0], after[1][0])
    assert after[0][1:] == after[1][1:]


class Queue(nn.Module):
    """Reads a buffer that a later operation of the same forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("memory", torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        y = (self.first(x) + self.memory).sigmoid()
        self.memory.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return self.last(y).sigmoid()


@pytest.mark.slow
def test_a_buffer_that_is_written_after_it_was_read() -> None:
    def twice(module: nn.Module, args: tuple[Tensor]) -> Tensor:
        loss = module(*args).sum() + module(args[0] * 2).square().sum()
        loss.backward()
        return loss

    assert_equal_steps(Queue(), X)
    assert_equal_steps(Queue(), X, step=twice)


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sigmoid() * torch.rand(x.shape, generator=self.generator)


@pytest.mark.parametrize("module", [OwnGenerator(), nn.Sequential(nn.Linear(6, 6), OwnGenerator())])
def test_a_generator_of_its_own_is_refused(module: nn.Module) -> None:
    with pytest.raises(TraceError, match=r"cannot be captured as one graph.*Remedy"):
        trace(module, X)
