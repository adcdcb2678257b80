"""Transforms, transformers, complex numbers, branches on values, list inputs: captured and trained for five steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from changing_steps import WIDTH, Halves, Outcome, outcome_of, slow
from torch import Tensor, nn
from torch.autograd import forward_ad


class Vmap(Halves):
    def between(self, h: Tensor) -> Tensor:
        return torch.vmap(lambda row: (row * row.sum()).tanh())(h)


class NestedVmap(Halves):
    def between(self, h: Tensor) -> Tensor:
        pairs = torch.vmap(torch.vmap(torch.mul, (None, 0)), (0, None))(h[:4], h[:4])
        return h * pairs.sum((0, 1)) + torch.vmap(self.head)(h)


class GradientTransform(Halves):
    def between(self, h: Tensor) -> Tensor:
        return h * torch.func.grad(lambda t: t.tanh().sum())(h)


class ForwardMode(Halves):
    """A derivative along a direction, by forward mode."""

    def between(self, h: Tensor) -> Tensor:
        with forward_ad.dual_level():
            pair = forward_ad.make_dual(h, torch.ones_like(h))
            slope = forward_ad.unpack_dual(self.head(pair)).tangent
        return h * slope


class Slopes(Halves):
    """Of a part, row by row and to the second order, as networks that solve differential equations have them."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def between(self, h: Tensor) -> Tensor:
        def value(row: Tensor) -> Tensor:
            return self.field(row).sum()

        h = h * torch.vmap(torch.func.grad(value))(h)
        out, pull_back = torch.func.vjp(lambda t: self.field[:2](t), h)
        curvature = torch.func.jacrev(torch.func.grad(value))(h[1])
        return pull_back(out)[0] + torch.func.jacrev(self.field[0])(h[0]) @ curvature @ h[2]


class Transformer(Halves):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def batch(self, k: int) -> tuple[Any, ...]:
        return (super().batch(k)[0].unflatten(0, (-1, 8)), torch.arange(8)[None] > 4 + torch.arange(8)[:, None] % 3)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.tail(self.encoder(self.head(x), src_key_padding_mask=padding))


class EncoderDecoder(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(WIDTH, 2, 1, 1, 16, batch_first=True)

    def between(self, h: Tensor) -> Tensor:
        h = h.unflatten(0, (-1, 8))
        mask = self.both.generate_square_subsequent_mask(8)
        return self.both(h, h.flip(1), tgt_mask=mask, tgt_is_causal=True).flatten(0, 1)


class AttentionWeights(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1)

    def between(self, h: Tensor) -> Tensor:
        h = h.unflatten(0, (-1, 8))
        out, weights = self.attention(h, h, h, need_weights=True)
        return (out * weights.mean()).flatten(0, 1)


class Complex(Halves):
    def between(self, h: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(h, dim=1)
        return torch.fft.irfft(spectrum * spectrum.abs(), n=WIDTH, dim=1)


class DataDependentBranch(Halves):
    def between(self, h: Tensor) -> Tensor:
        h = self.head(h)
        return h.tanh() if h.mean() > 0.55 else h * 2

    def batch(self, k: int) -> tuple[Any, ...]:
        return (super().batch(k)[0] * (1 + 30 * k),)


class ListInputs(Halves):
    """Images of several sizes, as detection models take them."""

    def batch(self, k: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(k)
        return ([torch.randn(20 + 3 * k + n, WIDTH, generator=generator) for n in range(3)],)

    def forward(self, xs: list[Tensor]) -> Tensor:
        return torch.cat([self.tail(self.head(x)) for x in xs])


class DeepCopyInForward(Halves):
    def between(self, h: Tensor) -> Tensor:
        twin = copy.deepcopy(self.head).requires_grad_(False)
        return h - twin(h)


CASES = [
    Vmap, NestedVmap, GradientTransform, ForwardMode, Slopes, Transformer, slow(EncoderDecoder), AttentionWeights,
    Complex, DataDependentBranch, ListInputs, DeepCopyInForward,
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is (deprecated|not supported)")  # PyTorch's, in forward mode
@pytest.mark.parametrize("case", CASES)
def test_what_models_do_is_captured_and_exact(case: type[Halves]) -> None:
    assert outcome_of(case) is Outcome.EXACT
