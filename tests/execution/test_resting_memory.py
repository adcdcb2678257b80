"""What rests gives up its memory: steps in which something rests peak where the first one did."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from rewriting import rewrite
from torch import Tensor, nn
from training_steps import assert_equal_traces, step_peak, traces

from lightning_remat import profile, simulate, trace
from lightning_remat.execution.learning import Learning
from lightning_remat.execution.program import Program
from lightning_remat.execution.resting import Form
from lightning_remat.execution.rewriter import programs_in
from lightning_remat.lowering import lower_kept
from lightning_remat.schedules.schedule import Schedule


class Product(nn.Module):
    """Returns a view of a product that nobody else knows, as linear layers of three dimensions did until torch 2.14."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(16, 16, bias=False).weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bij,kj->bik", x, self.weight)


class Blocks(nn.Module):
    """Of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.ups, self.downs = (nn.ModuleList(Product() for _ in range(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(nn.functional.gelu(up(x)))
        return x.sum()


class Unused(Blocks):
    """What is computed with gradients and returned to nobody: autograd's nodes go when the next value comes."""

    def forward(self, x: Tensor) -> Tensor:
        probes = x.detach()
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(nn.functional.gelu(up(x)))
            probes = (probes + 1).sigmoid() * up.weight.sum()
            probes = probes.detach()
        return x.sum()


class Layers(nn.Sequential):
    """The sum of what layers make."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


def program_of(module: nn.Module) -> Program:
    (program,) = programs_in(module)
    return program.variants[-1]


def rewritten(kind: type[nn.Module] = Blocks) -> tuple[nn.Module, Tensor]:
    module, x = kind(), torch.randn(64, 32, 16)
    graph = profile(trace(module, x), x, repeats=1)
    kept = {n for n, node in enumerate(graph.nodes) if node.kind != "einsum"}
    rewrite(module, lower_kept(graph, kept), x)
    return module, x


@pytest.mark.slow
def test_a_view_of_a_tensor_that_nobody_knows_rests_with_it() -> None:
    module, x = rewritten()
    peaks = [step_peak(module, x) for _ in range(3)]
    assert program_of(module).rests.operations
    assert len({*peaks}) == 1


def test_what_is_made_for_others_first_is_filled_when_it_is_made_for_a_backward() -> None:
    module, x = Layers(*(nn.Linear(16, 16) for _ in range(3))), torch.randn(1024, 16)
    plain = copy.deepcopy(module)
    schedule = Schedule.parse("F0 F1 D0 F2 D1 F3 D2 B3 D3 F0 F1 D0 B2 D1 F0 B1 D0 B0")
    expected = simulate(profile(trace(module, x), x, repeats=1), schedule).peak_bytes
    rewrite(module, schedule, x)
    assert [step_peak(module, x) for _ in range(3)] == [pytest.approx(expected, rel=0.001)] * 3
    assert program_of(module).rests.operations == {1, 2}
    assert_equal_traces(traces(plain, [x] * 3), traces(module, [x] * 3))


@pytest.mark.slow
def test_learning_holds_nothing_that_goes_meanwhile() -> None:
    module, x = rewritten(Unused)
    plain = step_peak(Unused(), x)
    peaks = [step_peak(module, x) for _ in range(3)]
    assert program_of(module).rests.operations
    assert len({*peaks}) == 1
    assert peaks[0] < plain


@pytest.mark.slow
def test_nothing_rests_where_something_else_holds_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    form = Learning._form

    def without_base(self: Learning, *args: Any) -> Form | None:
        found = form(self, *args)
        return None if found is None else replace(found, has_base=False)

    monkeypatch.setattr(Learning, "_form", without_base)
    module, x = rewritten()
    first, second, *others = (step_peak(module, x) for _ in range(4))
    assert second > first, "the base held what the view gave up"
    assert not program_of(module).rests.operations
    assert {*others} == {first}
