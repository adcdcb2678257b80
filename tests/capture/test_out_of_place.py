"""In-place activations run out of place where that lowers the peak: same results, a lower floor, hooks untouched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from small_vgg import small_vgg
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from training_steps import assert_equal_traces, step_peak, traces

from benchmarks.peaks import LOSS_BYTES
from lightning_remat import (
    PLANNERS,
    Graph,
    InfeasibleBudgetError,
    Plan,
    Schedule,
    plan,
    profile,
    rematerialize,
    restore,
    trace,
)
from lightning_remat.capture.tracer import out_of_place
from lightning_remat.lowering import lower_kept
from lightning_remat.operations.operation import TracedModule

QUICK = partial(PLANNERS["auto"], effort=0.02)


def keep_nothing(graph: Graph, _budget_bytes: int) -> Schedule:
    return lower_kept(graph, ())


def trace_out_of_place(module: nn.Module, x: Tensor) -> TracedModule | None:
    return out_of_place(trace(module, x), (x,), {})


def made_small_vgg() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*small_vgg(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(16 * 8 * 8, 5)), torch.randn(
        4, 3, 32, 32
    )


def floor(module: nn.Module, x: Tensor) -> int:
    with pytest.raises(InfeasibleBudgetError) as error:
        rematerialize(module, x, memory_budget=1, planner=QUICK)
    return int(error.value.minimum_bytes)


def fused_floor(module: nn.Module, x: Tensor) -> int:
    with pytest.raises(InfeasibleBudgetError) as error:
        plan(profile(trace(module, x), x, repeats=1), 1, QUICK)
    return int(error.value.minimum_bytes)


@pytest.mark.slow
def test_a_small_vgg_goes_below_the_floor_of_its_fused_graph() -> None:
    plain, x = made_small_vgg()
    ours = copy.deepcopy(plain)
    lowest = floor(ours, x)
    assert lowest < 0.9 * fused_floor(ours, x)
    made = rematerialize(ours, x, memory_budget=lowest, planner=QUICK)
    assert made.plain.peak_bytes == plan(profile(trace(plain, x), x, repeats=1), 1 << 62, "keep_all").peak_bytes
    assert step_peak(ours, x) - LOSS_BYTES <= lowest
    assert all(m.inplace for m in ours.modules() if isinstance(m, nn.ReLU))
    assert_equal_traces(traces(plain, [x] * 3), traces(ours, [x] * 3))
    restore(ours)
    assert step_peak(ours, x) == step_peak(plain, x)


@pytest.mark.slow
def test_a_plan_for_it_is_read_back_and_installed() -> None:
    module, x = made_small_vgg()
    lowest = floor(module, x)
    made = rematerialize(copy.deepcopy(module), x, memory_budget=lowest, planner=QUICK)
    read = Plan.from_json(made.to_json())
    assert read == made
    rematerialize(module, x, plan=read)
    assert step_peak(module, x) - LOSS_BYTES <= lowest


@pytest.mark.slow
def test_the_fused_graph_is_taken_where_it_suffices() -> None:
    pairs = [(nn.Conv2d(n, 16, 3, padding=1), nn.ReLU(inplace=True)) for n in (3, 16, 16, 16)]
    module, x = nn.Sequential(*(layer for pair in pairs for layer in pair)), torch.randn(4, 3, 32, 32)
    made = rematerialize(module, x, memory_budget=fused_floor(module, x), planner=QUICK)
    assert made.num_recomputed
    assert [node.name for node in made.graph.nodes] == [o.name for o in trace(module, x).operations]


@pytest.mark.slow
def test_a_lower_floor_is_told_even_if_it_is_missed() -> None:
    module, x = made_small_vgg()
    assert floor(module, x) < fused_floor(module, x)
    assert "forward" not in vars(module)


class Activated(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor], *, reads_before: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.activation = nn.Linear(6, 6), nn.Linear(6, 6), activation
        self.reads_before = reads_before

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.activation(y)
        return self.last(z + y if self.reads_before else z)


APART: dict[str, Callable[[Tensor], Tensor]] = {
    "ReLU": nn.ReLU(True),
    "ReLU6": nn.ReLU6(True),
    "SiLU": nn.SiLU(True),
    "Hardswish": nn.Hardswish(True),
    "Hardsigmoid": nn.Hardsigmoid(True),
    "Mish": nn.Mish(True),
    "relu": lambda y: functional.relu(y, inplace=True),
    "relu, by position": lambda y: functional.relu(y, True),
    "leaky_relu": lambda y: functional.leaky_relu(y, 0.2, inplace=True),
    "leaky_relu, by position": lambda y: functional.leaky_relu(y, 0.2, True),
    "silu": lambda y: functional.silu(y, inplace=True),
    "relu_": lambda y: y.relu_(),
    "torch.relu_": torch.relu_,
    "leaky_relu_": lambda y: functional.leaky_relu_(y, 0.3),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", APART)
def test_activations_apart_have_the_same_results(name: str) -> None:
    torch.manual_seed(0)
    plain, x = Activated(APART[name]), torch.randn(8, 6) * 3
    ours = copy.deepcopy(plain)
    apart = trace_out_of_place(ours, x)
    assert apart is not None
    assert len(apart.operations) == 3
    graph = profile(apart, x, repeats=1)
    rematerialize(ours, x, plan=plan(graph, 1 << 62, keep_nothing))
    assert_equal_traces(traces(plain, [x] * 3), traces(ours, [x] * 3))


@pytest.mark.slow
def test_what_is_overwritten_and_read_again_stays_in_place() -> None:
    x = torch.randn(8, 6)
    assert trace_out_of_place(Activated(nn.ReLU(True), reads_before=True), x) is None
    assert trace_out_of_place(Activated(nn.ReLU()), x) is None
    assert trace_out_of_place(Activated(nn.ELU(inplace=True)), x) is None, "its gradient would differ in a bit"


class Level(nn.Module):
    """A buffer that an activation writes, beside an activation of the network's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("level", torch.linspace(-1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu_(self.layer(x))
        with torch.no_grad():
            functional.leaky_relu_(self.level)
        return h * 2


def test_buffers_are_written_all_the_same() -> None:
    apart = trace_out_of_place(Level(), torch.randn(8, 6))
    assert apart is not None
    assert [placeholder.name for placeholder in apart.written] == ["l_self_buffers_level_"]


def test_what_a_hook_sees_stays_as_it_is() -> None:
    seen: list[Tensor] = []
    module, x = Activated(nn.ReLU(True)), torch.randn(8, 6)
    module.activation.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].detach().clone()))
    assert trace_out_of_place(module, x) is None
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert trace_out_of_place(module, torch.randn(8, 6)) is None
