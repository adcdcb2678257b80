"""What users write inside a forward, or do between a forward and its backward; each trained for five steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from changing_steps import BATCH, WIDTH, Halves, Outcome, failing, outcome_of, slow, stack
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class UnusedOutputs(Halves):
    """`h_n` and `c_n` die at once, and what comes next may take their place in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.rnn = nn.LSTM(16, 48, 2, bidirectional=True, batch_first=True)
        self.tail = nn.Linear(96, 4)

    def batch(self, k: int) -> tuple[Any, ...]:
        return (torch.randn(4, (5, 33, 16, 7, 61)[k], 16, generator=torch.Generator().manual_seed(k)),)

    def between(self, h: Tensor) -> Tensor:
        return self.rnn(h)[0]


class EvalBetween(Halves):
    """A callback evaluates between the forward and the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def between(self, h: Tensor) -> Tensor:
        return self.dropout(self.norm(h))

    def step(self, *batch: Any) -> Tensor:
        loss = self(*batch).square().mean()
        self.eval()
        with torch.no_grad():
            score = self(*batch).mean()
        loss.backward()
        self.train()
        return loss + score


class FrozenBetween(Halves):
    def step(self, *batch: Any) -> Tensor:
        loss = self(*batch).square().mean()
        self.head.requires_grad_(False)
        loss.backward()
        self.head.requires_grad_(True)
        return loss


class FrozenAtFirst(Halves):
    """Freezes a layer itself, in the first steps: they are planned."""

    def between(self, h: Tensor) -> Tensor:
        self.head[0].requires_grad_(self.number > 2)
        return h

    def change(self, k: int) -> None:
        self.number = k


class Checkpoint(Halves):
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(stack(1), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2))

    def between(self, h: Tensor) -> Tensor:
        return checkpoint(self.inner, h, use_reentrant=self.reentrant)


class ReentrantCheckpoint(Checkpoint):
    reentrant = True


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.exp() * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * x.exp() * ctx.scale, None


class _Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.x, ctx.scale = x, scale
        ctx.y = x.sigmoid()
        return ctx.y * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.scale * ctx.y * (1 - ctx.y) + ctx.x * 0, None


class CustomFunction(Halves):
    function: Any = _Saves

    def change(self, k: int) -> None:
        self.scale = 1.0 + k / 10

    def between(self, h: Tensor) -> Tensor:
        return self.function.apply(self.head(h), self.scale)


class CustomFunctionKeepsOnContext(CustomFunction):
    function = _Keeps


class PositionsInPlace(Halves):
    """An in-place sum of what reads a constant of its own first part, as in SimpleViT."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pos", torch.linspace(0, 1, WIDTH))

    def between(self, h: Tensor) -> Tensor:
        h = h * 2
        h += self.pos.to(h.dtype)
        return h


class ClassToken(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, 1, WIDTH))

    def between(self, h: Tensor) -> Tensor:
        h = h.unflatten(0, (-1, 4))
        h = torch.cat([self.token.expand(h.shape[0], -1, -1), h], dim=1)
        h += self.token.expand(h.shape[0], h.shape[1], -1)
        return h.flatten(0, 1)


class SplitTwice(Halves):
    def between(self, h: Tensor) -> Tensor:
        for _ in range(2):
            half = h.shape[1] // 2
            a, b = torch.split(h, [half, half], dim=1)
            h = torch.cat([a.sigmoid() * b, b.tanh()], dim=1)
        return h


class ForcesInForward(Halves):
    """The gradient with respect to the input is a result, as forces are."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        energy = super().forward(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy / BATCH - force


class PenaltyInPart(Halves):
    def between(self, h: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(h.tanh().sum(), h, create_graph=True)
        return h * slope


class HookKeepsOutput(Halves):
    """A hook holds the output of the last forward, with its graph, until the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {}
        self.head[1].register_forward_hook(self._keep)

    def _keep(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.kept["output"] = output

    def step(self, *batch: Any) -> Tensor:
        loss = super().step(*batch)
        self.kept["mean"] = self.kept["output"].mean().detach()
        return loss


class Scripted(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()))

    def __deepcopy__(self, memo: Any) -> Scripted:
        """PyTorch's own copy has parameters that are no leaves."""
        made = type(self)()
        made.load_state_dict(self.state_dict())
        return made

    def change(self, k: int) -> None:
        """Scripts are compiled otherwise, with other bits, once they have run a few times."""
        for _ in range(4):
            out = self.scripted(torch.randn(BATCH, WIDTH, requires_grad=True))
            torch.autograd.grad(out.sum(), self.scripted[0].bias)

    def between(self, h: Tensor) -> Tensor:
        return self.scripted(h)


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class ScriptedFunction(Halves):
    """Calls a function that is compiled by `torch.jit`, as many a model does for its activations."""

    swish: Any = None

    def __init__(self) -> None:
        super().__init__()
        ScriptedFunction.swish = ScriptedFunction.swish or torch.jit.script(swish)

    def change(self, k: int) -> None:
        for _ in range(4):
            x = torch.randn(BATCH, WIDTH, requires_grad=True)
            torch.autograd.grad(self.swish(x).sum(), x)

    def between(self, h: Tensor) -> Tensor:
        return self.swish(h)


class NumpyArgument(Halves):
    def batch(self, k: int) -> tuple[Any, ...]:
        return (*super().batch(k), np.full(WIDTH, 1.0 + k, dtype=np.float32))

    def forward(self, x: Tensor, scale: Any) -> Tensor:
        return self.tail(self.head(x) * torch.from_numpy(scale))


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None


class DataclassOutput(Halves):
    def forward(self, x: Tensor) -> Output:
        h = self.head(x)
        return Output(self.tail(h), hidden=h)

    def step(self, *batch: Any) -> Tensor:
        out = self(*batch)
        loss = out.logits.square().mean() + out.hidden.mean()
        loss.backward()
        return loss


class _Result:
    def __init__(self, logits: Tensor, losses: dict[str, Tensor]) -> None:
        self.logits, self.losses = logits, losses


class ObjectOutput(Halves):
    """A class that PyTorch's trees know nothing of."""

    def forward(self, x: Tensor) -> _Result:
        y = self.tail(self.head(x))
        return _Result(y, {"mean": y.mean(), "square": y.square().mean()})

    def step(self, *batch: Any) -> Tensor:
        out = self(*batch)
        loss = sum(out.losses.values()) + out.logits.mean()
        loss.backward()
        return loss


class DictionaryOutput(Halves):
    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.head(x)
        return {"y": self.tail(h), "inner": [h, (h.mean(), 3)], "name": "dictionary"}

    def step(self, *batch: Any) -> Tensor:
        out = self(*batch)
        loss = out["y"].square().mean() + out["inner"][1][0] * out["inner"][1][1]
        loss.backward()
        return loss


CASES = [
    slow(UnusedOutputs), EvalBetween, FrozenBetween, FrozenAtFirst, Checkpoint, ReentrantCheckpoint, CustomFunction,
    CustomFunctionKeepsOnContext, PositionsInPlace, ClassToken, SplitTwice, HookKeepsOutput, Scripted, ScriptedFunction,
    NumpyArgument, DataclassOutput, ObjectOutput, DictionaryOutput,
    failing(ForcesInForward, "what differentiates all of itself needs it at once: nothing is worth recomputing"),
    PenaltyInPart,
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is (deprecated|not supported)")
@pytest.mark.parametrize("case", CASES)
def test_what_users_write_is_captured_and_exact(case: type[Halves]) -> None:
    assert outcome_of(case) is Outcome.EXACT
