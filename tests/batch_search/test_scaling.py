"""A graph at a batch size that was not profiled: every byte of it is that of a profile made at that size."""

from __future__ import annotations

import random
from dataclasses import MISSING, fields, replace

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import Graph, Node, profile, simulate, trace
from lightning_remat.batch_search.scaling import Line, ScalableGraph
from lightning_remat.lowering import lower_kept
from lightning_remat.schedules.graph import fields_in

SMALL, LARGE = 4, 8
OTHER_SIZES = (5, 16)


@pytest.mark.parametrize("kind", [Node, Graph])
@pytest.mark.parametrize("unit", ["bytes", "seconds", "price"])
def test_every_field_says_what_it_counts(kind: type[Node | Graph], unit: str) -> None:
    """A new field of bytes, seconds or prices is told by its name here, and by its metadata everywhere else."""
    named = tuple(f.name for f in fields(kind) if f.name.endswith(f"_{unit}"))
    assert fields_in(unit, kind) == named


@pytest.mark.parametrize("name", [f.name for f in fields(Node) if f.default is not MISSING])
def test_every_field_of_a_node_scales_or_stays(name: str) -> None:
    counted = (*fields_in("bytes", Node), *fields_in("seconds", Node))
    small, large = (Node("a", **(dict.fromkeys(counted, 10 * size))) for size in (SMALL, LARGE))
    if name in counted:
        small, large = replace(small, **{name: 100 + SMALL}), replace(large, **{name: 100 + LARGE})
    scaled = ScalableGraph(Line(SMALL, LARGE), Graph((small,)), Graph((large,))).at(16).nodes[0]
    if name not in counted:
        assert getattr(scaled, name) == getattr(large, name)
    else:
        assert getattr(scaled, name) == pytest.approx(100 + 16)


def test_a_gradient_that_is_as_large_as_its_output_grows_with_it() -> None:
    small, large = (Graph((Node("a", output_bytes=size),)) for size in (SMALL, LARGE))
    assert ScalableGraph(Line(SMALL, LARGE), small, large).at(16).gradient_bytes(0) == 16


class Twofold(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin().relu_()


class Held(nn.Module):
    """One operation of two, whose output's gradient another branch holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twofold, self.last = nn.Linear(32, 32), Twofold(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.twofold(x) + x)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 2, 1),
        nn.Conv2d(2, 8, 1),
        nn.ReLU(inplace=True),
        nn.BatchNorm2d(8),
        nn.SiLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 8 * 8, 10),
        nn.Dropout(0.1),
    )


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "shape"),
    [(Held(), (64, 32)), (convolutions(), (4, 8, 8)), (attention(), (7, 32))],
    ids=["held", "convolutions", "attention"],
)
def test_peaks_at_other_sizes_are_those_of_a_profile_made_there(module: nn.Module, shape: tuple[int, ...]) -> None:
    def profiled(size: int) -> Graph:
        x = torch.randn(size, *shape)
        # What kernels allocate inside themselves is no line: by the size they choose how to go about it.
        return profile(trace(module, x), x, repeats=1, with_kernels=False)

    scalable = ScalableGraph(Line(SMALL, LARGE), profiled(SMALL), profiled(LARGE))
    excesses = ("backward_release_bytes", "backward_shared_bytes", "backward_shared_release_bytes")
    assert any(getattr(n, name) for n in scalable.large.nodes for name in excesses), "nothing here tells them apart"
    rng = random.Random(0)
    for size in OTHER_SIZES:
        predicted, there = scalable.at(size), profiled(size)
        for _ in range(20):
            schedule = lower_kept(there, [n for n in range(len(there.nodes)) if rng.random() < 0.5])
            assert simulate(predicted, schedule).memory_bytes == simulate(there, schedule).memory_bytes, (
                size,
                schedule,
            )
