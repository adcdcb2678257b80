"""Random modules with everything that makes recomputation hard, for property tests of capture and executor."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st
from torch import Tensor, nn

KINDS = [
    "linear",
    "relu",
    "relu_",
    "batch_norm",
    "dropout",
    "functional_dropout",
    "add",
    "iadd",
    "mul_",
    "chunk",
    "view",
    "slice_write",
    "cat",
    "recurrent",
    "shared",
    "gate",
    "sigmoid",
    "softmax",
    "detach",
    "rand",
    "spectral",
    "function",
    "no_grad",
    "several",
    "asserts",
    "choice",
    "tanh",
    "layer_norm",
    "lstm_cell",
    "gru_cell",
    "convolution",
    "attention",
    "products",
]


class Scaled(torch.autograd.Function):
    """Has a backward of its own, which reads a tensor that autograd does not know of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x.round() + x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (2 + ctx.x.sin())


@dataclass(frozen=True)
class Step:
    """One line of a random module's forward: what to do to which of the last values."""

    kind: str
    first: int
    second: int


class Recurrent(nn.Module):
    """An operation with three outputs of which two are unused, and die at once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.unsqueeze(1))[0].squeeze(1)


class RandomModule(nn.Module):
    """Interprets its steps; every value is (batch, width)."""

    def __init__(self, steps: list[Step], width: int) -> None:
        super().__init__()
        self.steps, self.width = steps, width
        self.returns_sum = False  # a scalar, so that it does not matter how long the caller holds it
        self.shared = nn.Linear(width, width)
        self.parts = nn.ModuleList(self._part(s.kind) for s in steps)

    def __repr__(self) -> str:
        return f"RandomModule({self.steps})"

    def _part(self, kind: str) -> nn.Module:
        width = self.width
        if kind == "linear":
            return nn.Linear(width, width)
        if kind == "spectral":
            return nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))
        if kind == "batch_norm":
            return nn.BatchNorm1d(width)
        if kind == "dropout":
            return nn.Dropout(0.5)
        if kind == "relu":
            return nn.ReLU()
        if kind == "relu_":
            return nn.ReLU(inplace=True)
        if kind == "layer_norm":
            return nn.LayerNorm(width)
        if kind == "lstm_cell":
            return nn.LSTMCell(width, width)
        if kind == "gru_cell":
            return nn.GRUCell(width, width)
        if kind == "convolution":
            return nn.Conv1d(1, 2, 3, padding=1)
        return Recurrent(width) if kind == "recurrent" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        values = [self.shared(x)]
        for step, part in zip(self.steps, self.parts, strict=True):
            a = values[step.first % len(values)]
            b = values[step.second % len(values)]
            values.append(self._run(step.kind, part, a, b))
        if self.returns_sum:
            return values[-1].square().sum() + values[len(values) // 2].square().sum()
        return values[-1], values[len(values) // 2]

    def _run(self, kind: str, part: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        if kind == "functional_dropout":
            return F.dropout(a, 0.3, self.training)
        if kind == "add":
            return a + b
        if kind == "iadd":
            c = a * 1.5
            c += b
            return c
        if kind == "mul_":
            return a.exp().clamp(max=2).mul_(0.5)
        if kind == "chunk":
            left, right = a.chunk(2, dim=1)
            return torch.cat([right.sin(), left * right], dim=1)  # what backwards read
        if kind == "view":
            return a.view(-1, 2, self.width // 2).transpose(1, 2).reshape(-1, self.width)
        if kind == "slice_write":
            c = a * 1.0
            c[:, 1:] = b[:, 1:] * 0.5
            return c
        if kind == "cat":
            return torch.cat([a[:, : self.width // 2], b[:, self.width // 2 :]], dim=1)
        if kind == "shared":
            return self.shared(a)
        if kind == "gate":
            return a * b.sigmoid()
        if kind == "sigmoid":
            return a.sigmoid()
        if kind == "softmax":
            return F.layer_norm(a.softmax(1), (self.width,))
        if kind == "detach":
            return a + b.detach()
        if kind == "function":
            return Scaled.apply(a)
        if kind == "no_grad":
            with torch.no_grad():
                scale = a.abs().mean() + 1
            return a / scale
        if kind == "several":
            values, where = a.sort(dim=1)
            variance, mean = torch.var_mean(b, dim=1, keepdim=True)
            return (values.gather(1, where) - mean) * variance
        if kind == "rand":
            return a + torch.rand_like(b)
        if kind == "asserts":
            assert (a.isnan() | (a.abs() >= 0)).all(), "neither a number nor none"
            return a * 1.25
        if kind == "choice":  # gradients could flow to what it is made by, and do not
            chosen = (self.shared(b).sigmoid() * a).argmax(dim=1, keepdim=True)
            return a * 0.5 + a.gather(1, chosen)
        if kind == "tanh":
            return a.tanh()
        if kind == "lstm_cell":
            hidden, cell = part(a, (b, a))
            return hidden + cell
        if kind == "gru_cell":
            return part(a, b)
        if kind == "convolution":
            return part(a.unsqueeze(1)).mean(1)
        if kind == "attention":
            q, k = (t.view(-1, 1, 2, self.width // 2) for t in (a, b))
            return F.scaled_dot_product_attention(q, k, k, dropout_p=0.2).reshape(-1, self.width)
        if kind == "products":
            return torch.bmm(a.unsqueeze(2), b.unsqueeze(1)).mean(2)
        return part(a)


common = settings(
    deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
"""What property tests of them have in common: examples take long, and are not made smaller."""


@contextmanager
def refusals_left_out() -> Generator[None]:
    """An example that plain autograd does not take is none: something has been written that a backward reads."""
    try:
        yield
    except RuntimeError as error:
        assume("modified by an inplace operation" not in str(error) and "modified inplace" not in str(error))
        raise


@st.composite
def modules(
    draw: st.DrawFn, *, max_steps: int = 9, width: int = 4, kinds: tuple[str, ...] = tuple(KINDS)
) -> RandomModule:
    """A random module, its parameters drawn from a random seed."""
    steps = draw(
        st.lists(
            st.builds(Step, st.sampled_from(kinds), st.integers(-3, -1), st.integers(-4, -1)),
            min_size=1,
            max_size=max_steps,
        )
    )
    torch.manual_seed(draw(st.integers(0, 1000)))
    return RandomModule(steps, width)
