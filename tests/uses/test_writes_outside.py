"""Forwards that write what lies outside the graph.

Their weights: forced norms, largest norms, clipping, averages of directions. Their inputs: scaled, masked, taken apart.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from changing_steps import BATCH, WIDTH, Halves, Outcome, keeping_nothing, outcome_of, slow
from torch import Tensor, nn
from torch.nn import functional

from lightning_remat import profile, rematerialize, trace
from lightning_remat.execution.assembly import compile_schedule
from lightning_remat.module_state.batches import tensors_held


def directions(weight: Tensor) -> Tensor:
    """Rows of length one."""
    return weight / (weight.norm(dim=1, keepdim=True) + 1e-4)


class Forced(nn.Linear):
    """EDM2's layer: the weight is normalized in place, then once more where gradients see it."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight.to(torch.float32).contiguous()
        if self.training:
            with torch.no_grad():
                self.weight.copy_(directions(weight))
        weight = directions(weight)
        return functional.linear(input, weight.to(input.dtype), self.bias)


class ForcedNorms(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.head[0], self.tail[2] = Forced(WIDTH, WIDTH), Forced(WIDTH, WIDTH)
        self.middle = Forced(WIDTH, WIDTH)

    def between(self, h: Tensor) -> Tensor:
        return self.middle(h).sigmoid()


class LargestNorm(nn.Linear):
    """EEGNet's layer."""

    def forward(self, input: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(input)


class LargestNorms(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.head[2], self.tail[0] = LargestNorm(WIDTH, WIDTH), LargestNorm(WIDTH, WIDTH)


class Clipped(Halves):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for weight in self.parameters():
                weight.clamp_(-0.3, 0.3)
        return super().forward(x)


class ClippedByData(Halves):
    def forward(self, x: Tensor) -> Tensor:
        for weight in self.parameters():
            weight.data.clamp_(-0.3, 0.3)
        return super().forward(x)


class ClippedAsItIsRead(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.scale.clamp_(-0.5, 0.5)
        return (h * scale).sigmoid()


class DecayedAfterIt(Halves):
    """A recomputation of the first layer needs its weight as it was."""

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.head[0].weight.mul_(0.9)
        return h


class DecayedByDataAfterIt(Halves):
    def between(self, h: Tensor) -> Tensor:
        self.head[0].weight.data.mul_(0.9)
        return h


class ExchangedAfterIt(Halves):
    def between(self, h: Tensor) -> Tensor:
        self.head[0].weight.data = self.head[0].weight.data * 0.9
        return h


class Indexed(Halves):
    """Rows of a table."""

    def batch(self, k: int) -> tuple[Any, ...]:
        return (torch.randint(20, (BATCH, 3), generator=torch.Generator().manual_seed(k)),)


class NormedTable(Indexed):
    """The same table twice in a forward, which writes it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH, max_norm=0.7)

    def forward(self, x: Tensor) -> Tensor:
        h = self.head(self.table(x[:, 0]))
        return self.tail(h + self.table(x[:, 1]).tanh())


class NormedBag(Indexed):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, WIDTH, max_norm=0.7, norm_type=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.table(x))


class Spectral(Halves):
    """Spectral normalization as models had it before PyTorch did."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.u = nn.Parameter(functional.normalize(torch.randn(WIDTH), dim=0), requires_grad=False)
        self.v = nn.Parameter(functional.normalize(torch.randn(WIDTH), dim=0), requires_grad=False)

    def between(self, h: Tensor) -> Tensor:
        matrix = self.weight.view(WIDTH, -1)
        self.v.data = functional.normalize(torch.mv(matrix.data.t(), self.u.data), dim=0)
        self.u.data = functional.normalize(torch.mv(matrix.data, self.v.data), dim=0)
        sigma = self.u.dot(matrix.mv(self.v))
        return functional.linear(h, self.weight / sigma.expand_as(self.weight)).sigmoid()


class ScaledInput(Halves):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sub_(0.5).div_(2))


class MaskedInput(Halves):
    def forward(self, x: Tensor) -> Tensor:
        x[x > 0.5] = 0
        x[:, 1].mul_(3)
        return super().forward(x)


class InputScaledAfterIt(Halves):
    """The first layer is recomputed from what it read, of which only its weight's gradient sees no more."""

    def batch(self, k: int) -> tuple[Any, ...]:
        return (*super().batch(k), torch.linspace(0, 1, BATCH)[:, None])

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        h = self.head(x + level)
        x.mul_(2)
        level += 1
        return self.tail(h + x * level)


class InputScaledByDataAfterIt(Halves):
    def forward(self, x: Tensor) -> Tensor:
        h = self.head(x)
        x.data.mul_(2)
        return self.tail(h)


class InputInPieces(Halves):
    """What divides the forward leaves the write to the first piece."""

    def forward(self, x: Tensor) -> Tensor:
        x.relu_()
        h = self.head(x)
        torch._dynamo.graph_break()
        return self.tail(h + x)


class HandedOn(Halves):
    """Casts that change nothing hand on what gradients flow to, under no_grad, too."""

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            h = h.float().contiguous()
        return h


class HandedOnWritten(Halves):
    def between(self, h: Tensor) -> Tensor:
        h = h * 2
        with torch.no_grad():
            h = h.mul_(2)
        return h.sin()


class TakenApart(Halves):
    def batch(self, k: int) -> tuple[Any, ...]:
        return ({"x": super().batch(k)[0], "level": torch.ones(WIDTH)},)

    def forward(self, batch: Any) -> Tensor:
        level = batch.pop("level")
        batch["h"] = self.head(batch["x"])
        return self.tail(batch["h"] * level)


class TakenApartInPieces(TakenApart):
    def forward(self, batch: Any) -> Tensor:
        level = batch.pop("level")
        batch["h"] = self.head(batch["x"])
        torch._dynamo.graph_break()
        return self.tail(batch["h"] * level)


class ObjectTakenApart(Halves):
    """Layers of graph networks hand on the graph itself."""

    def batch(self, k: int) -> tuple[Any, ...]:
        return (SimpleNamespace(x=super().batch(k)[0], of=[SimpleNamespace(level=torch.ones(WIDTH))]),)

    def forward(self, graph: Any) -> Tensor:
        graph.x = self.head(graph.x)
        graph.x = graph.x * graph.of.pop().level
        graph.x = self.tail(graph.x)
        return graph.x


class ObjectTakenApartInPieces(ObjectTakenApart):
    def forward(self, graph: Any) -> Tensor:
        graph.x = self.head(graph.x)
        torch._dynamo.graph_break()
        return self.tail(graph.x * graph.of.pop().level)


CASES = [
    ForcedNorms, LargestNorms, Clipped, ClippedByData, ClippedAsItIsRead, DecayedAfterIt, DecayedByDataAfterIt,
    ExchangedAfterIt, NormedTable, NormedBag, Spectral,
    ScaledInput, MaskedInput, InputScaledAfterIt, InputScaledByDataAfterIt, InputInPieces,
    HandedOn, HandedOnWritten, TakenApart, TakenApartInPieces, ObjectTakenApart, ObjectTakenApartInPieces,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_written_once_and_recomputed_from_as_it_was(case: type[Halves]) -> None:
    assert outcome_of(case) is Outcome.EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        MaskedInput,
        InputScaledAfterIt,
        *(slow(c) for c in (InputInPieces, TakenApartInPieces, ObjectTakenApartInPieces)),
    ],
)
def test_planning_leaves_the_inputs_as_they_were(case: type[Halves]) -> None:
    module = case()
    batch = module.batch(0)
    rematerialize(module, *batch, memory_budget="90%")
    assert all(torch.equal(a, b) for a, b in zip(tensors_held(batch), tensors_held(module.batch(0)), strict=True))


@pytest.mark.parametrize("case", [ForcedNorms, LargestNorms, ClippedAsItIsRead, NormedBag, Spectral, ScaledInput])
def test_no_copies_are_made_of_what_is_written_before_it_is_read(case: type[Halves]) -> None:
    assert not _names_that_read_copies(case())


def test_of_what_is_written_afterwards_copies_are_made() -> None:
    assert _names_that_read_copies(DecayedAfterIt()) == ["head.0"]


def _names_that_read_copies(module: Halves) -> list[str]:
    batch = module.batch(0)
    traced = trace(module, *batch)
    assert traced.written
    graph = profile(traced, *batch, repeats=1)
    program = compile_schedule(traced, keeping_nothing(graph, 0), graph)
    return [step.operation.name for step in program.steps if step.kept]
