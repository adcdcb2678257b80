"""Inputs, buffers and frozen parts made in inference mode, where autograd counts no writes, serve as in a plain run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from changing_steps import WIDTH, Halves, Outcome, outcome_of
from torch import Tensor, nn

from lightning_remat import profile, rematerialize, trace


class Shifted(Halves):
    """Adds what no backward reads before the first layer, as one may not be given tensors of inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + self.shift)


class Input(Shifted):
    def batch(self, k: int) -> tuple[Any, ...]:
        with torch.inference_mode():
            return tuple(t.clone() for t in super().batch(k))


class InputNowAndThen(Shifted):
    def batch(self, k: int) -> tuple[Any, ...]:
        with torch.inference_mode(k in (1, 4)):
            return tuple(t.clone() for t in super().batch(k))


class Returned(Input):
    """A view of the input is among the outputs."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x[:, :2]

    def step(self, *batch: Any) -> Tensor:
        out, part = self(*batch)
        assert part.is_inference()
        loss = out.square().mean() + part.sum()
        loss.backward()
        return loss


class Buffer(Halves):
    """Made anew before each step, as a table of positions by who knows the length."""

    def change(self, k: int) -> None:
        with torch.inference_mode():
            self.register_buffer("positions", torch.arange(WIDTH) + float(k))

    def between(self, h: Tensor) -> Tensor:
        return h + self.positions


class Teacher(Halves):
    """A frozen part is built in inference mode, and runs without gradients."""

    def change(self, k: int) -> None:
        if not hasattr(self, "teacher"):
            self.teacher = nn.Linear(WIDTH, WIDTH)
        if not self.teacher.weight.is_inference():  # copies are not
            with torch.inference_mode():
                self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
                self.teacher.weight.fill_(0.25)
                self.teacher.bias.fill_(0.5)

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(h)
        return h + target


@pytest.mark.sampled
@pytest.mark.parametrize("case", [Input, InputNowAndThen, Returned, Buffer, Teacher])
def test_steps_are_those_of_the_plain_module(case: type[Halves]) -> None:
    assert outcome_of(case) is Outcome.EXACT


@pytest.mark.slow
def test_what_is_planned_there_trains_outside() -> None:
    module, x = Halves(), Halves().batch(0)[0]
    with torch.inference_mode():
        nodes = profile(trace(module, x), x).nodes
        plan = rematerialize(module, x, memory_budget="95%", planner="periodic")
        assert torch.is_inference_mode_enabled()
    assert len(nodes) == len(plan.graph.nodes) == 8
    assert plan.num_recomputed
    module(x).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_a_module_that_nothing_trains_is_refused_by_name() -> None:
    with torch.inference_mode():
        module = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"parameter 0\.weight was made in torch\.inference_mode.*Remedy"):
        rematerialize(module, torch.ones(2, 3))
