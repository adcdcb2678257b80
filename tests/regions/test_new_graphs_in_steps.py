"""A step that captures and plans something new keeps its budget meanwhile, and holds nothing of it afterwards."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training_steps import assert_equal_traces, step_peak, traces

from lightning_remat import rematerialize
from lightning_remat.execution.rewriter import num_profiled


class Scan(nn.Module):
    """A recurrence over the sequence: every length is another graph."""

    def __init__(self, width: int = 32, states: int = 8) -> None:
        super().__init__()
        self.into, self.steps, self.out = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * states + 1),
            nn.Linear(width, width),
        )
        self.decay, self.states = nn.Parameter(torch.rand(width, states)), states

    def forward(self, u: Tensor) -> Tensor:
        x = functional.silu(self.into(u))
        dt, b, c = self.steps(x).split([1, self.states, self.states], -1)
        decay, added = torch.exp(-dt[..., None] * self.decay), dt[..., None] * b[:, :, None] * x[..., None]
        h = torch.zeros_like(added[:, 0])
        found: list[Tensor] = []
        for t in range(u.shape[1]):
            h = decay[:, t] * h + added[:, t]
            found.append((h * c[:, t, None]).sum(-1))
        return u + self.out(torch.stack(found, 1))


class Breaks(nn.Module):
    does_break = False

    def forward(self, x: Tensor) -> Tensor:
        if self.does_break:
            print(end="")
        return x


def scans() -> nn.Sequential:
    return nn.Sequential(Scan(), Scan())


class Checkpoint(torch.autograd.Function):
    """One of a user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: nn.Module) -> Tensor:
        ctx.x, ctx.part = x.detach(), part
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            torch.autograd.backward(ctx.part(x), gradient)
        return x.grad, None


class Checkpoints(nn.Module):
    """Recomputes its middle by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (
            nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(64, 64), nn.Tanh()))) for depth in (3, 8, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Checkpoint.apply(self.first(x), self.middle))


@pytest.mark.slow
@pytest.mark.parametrize("length", [6, 9])
def test_a_step_in_which_something_is_planned_anew_stays_within_the_budget(length: int) -> None:
    plain, x, other = scans(), torch.randn(16, 8, 32), torch.randn(16 * 8 // length, length, 32)
    ours = copy.deepcopy(plain)
    plan = rematerialize(ours, x, memory_budget="80%")
    before = num_profiled([ours])
    peaks = [step_peak(ours, batch) for batch in (x, other, x, other)]
    assert num_profiled([ours]) > before, "else it tells nothing"
    assert max(peaks) <= 1.02 * plan.budget_bytes
    assert_equal_traces(traces(plain, [x, other]), traces(ours, [x, other]))


@pytest.mark.slow
def test_what_runs_without_gradients_is_not_profiled_for_them() -> None:
    plain, large, small = Checkpoints(), torch.randn(512, 64), torch.randn(256, 64)
    ours = copy.deepcopy(plain)
    plan = rematerialize(ours, large, memory_budget="95%")
    peaks = [step_peak(ours, batch) for batch in (large, small, large)]
    assert max(peaks) <= plan.budget_bytes
    assert not num_profiled([ours])
    assert_equal_traces(traces(plain, [large, small, large]), traces(ours, [large, small, large]))


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Python looks for nothing that refers to itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
def test_what_a_capture_caught_does_not_hold_the_step(uncollected: None) -> None:
    """TorchDynamo keeps errors that refer to themselves, through their frames: and so all that these steps make."""

    def step(batch: Tensor, *, does_break: bool) -> weakref.ref[Tensor]:
        ours[1].does_break = does_break
        loss = ours(batch).mean()
        made = torch.zeros(1000)
        loss.backward()
        return weakref.ref(made)

    ours = nn.Sequential(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), Breaks(), nn.Tanh())
    x = torch.randn(64, 32)
    rematerialize(ours, x, memory_budget="95%")
    assert step(x, does_break=False)() is None
    with pytest.warns(UserWarning, match="runs without rematerialization where it breaks now"):
        assert step(x, does_break=True)() is None
