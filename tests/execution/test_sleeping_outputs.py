"""Outputs that give up their memory within the forward, and are filled again there."""

import copy
from typing import Any

import pytest
import torch
from rewriting import rewrite
from torch import Tensor, nn
from training_steps import assert_equal_traces, step_peak, traces

from benchmarks.peaks import LOSS_BYTES
from lightning_remat import profile, simulate, trace
from lightning_remat.lowering import apply_liveness
from lightning_remat.schedules.schedule import Schedule


def test_a_recomputation_within_the_forward() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(8, 4)
    plain = copy.deepcopy(module)
    schedule = "F0 F1 D0 D1 F0 F1 F2 D0 D1 F3 D2 B3 D3 F0 F1 D0 B2 B1 D1 B0"
    rewrite(module, Schedule.parse(schedule), x)
    assert_equal_traces(traces(plain, [x]), traces(module, [x]))


def test_what_others_hold_is_not_emptied_when_it_is_recomputed_within_the_forward() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Tanh())
    held: list[torch.Tensor] = []
    module[1].register_forward_hook(lambda _m, _i, out: held.append(out))
    x = torch.randn(8, 4)
    plain = module(x)
    rewrite(module, Schedule.parse("F0 F1 F2 D0 D1 F0 F1 F3 D0 D1 D2 B3 D3 F0 F1 D0 B2 B1 D1 B0"), x)
    assert torch.equal(module(x), plain)
    assert torch.equal(*held)
    held.clear()  # a module that holds its own outputs holds their step, which holds the module


class SavesAnItem(nn.Module):
    """What reads an item of a tuple saves the tuple's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.cell(x, (x, x))
        return self.head(hidden).sigmoid()


@pytest.mark.slow
def test_a_value_that_is_gone_before_it_is_saved_is_not_held() -> None:
    x = torch.randn(4096, 8)
    graph = profile(trace(SavesAnItem(), x), x)
    assert [n.saved for n in graph.nodes[2:]] == [(0,), (3,)]
    schedule = Schedule.parse("F0 T0 F1 D0 F2 D1 F3 D2 B3 D3 F0 T0 B2 D0 B1 F0 D0 B0 T0")
    plain, ours = SavesAnItem(), SavesAnItem()
    ours.load_state_dict(plain.state_dict())
    rewrite(ours, schedule, x)
    assert_equal_traces(traces(plain, [x]), traces(ours, [x]))
    assert step_peak(ours, x) - LOSS_BYTES <= simulate(graph, schedule).peak_bytes


def test_a_view_that_sleeps_is_not_what_a_backward_reads() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid(), nn.Flatten(), nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(8, 2, 2)
    plain = copy.deepcopy(module)
    rewrite(module, Schedule.parse("F0 F1 F2 F3 D2 F2 F4 D2 D3 B4 D4 B3 B2 B1 D1 D0 B0"), x)
    assert_equal_traces(traces(plain, [x]), traces(module, [x]))


class TakesTarget(nn.Module):
    """Its loss saves a view of an input, as language models do with their labels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.linear(x).sigmoid(), target.view(-1))


def test_a_view_of_an_input_that_sleeps_is_what_a_backward_reads() -> None:
    plain, ours = TakesTarget(), TakesTarget()
    ours.load_state_dict(plain.state_dict())
    x, target = torch.randn(8, 4), torch.randint(0, 4, (2, 4))
    graph = profile(trace(ours, x, target), x, target)
    assert [n.name for n in graph.nodes] == ["linear", "sigmoid", "view", "cross_entropy"]
    rewrite(ours, Schedule.parse("F0 F1 D0 F2 D2 F2 F3 D2 B3 D3 T3 B2 B1 D1 B0"), x, target)
    assert torch.equal(plain(x, target), ours(x, target))
    plain(x, target).backward()
    ours(x, target).backward()
    assert torch.equal(plain.linear.weight.grad, ours.linear.weight.grad)


class CastsInVain(nn.Module):
    """What it casts is of that type already: three gradients of one tensor are added up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        z = y.float()
        return (z.cos() + y.sin()) * z.tanh()


def test_gradients_of_a_tensor_that_two_operations_return_are_added_in_plain_order() -> None:
    module, x = CastsInVain(), torch.randn(4096, requires_grad=True)
    graph = profile(trace(module, x), x)
    assert [n.name for n in graph.nodes] == ["exp", "float", "cos", "sin", "add", "tanh", "mul"]
    expected = torch.autograd.grad(module(x).sum(), x)
    rewrite(module, Schedule.parse("F0 F1 F2 F3 F4 D2 D3 D1 F1 F5 F6 B6 D6 D4 B5 D5 B4 F3 D3 B3 B2 B1 D1 B0 D0"), x)
    assert torch.equal(torch.autograd.grad(module(x).sum(), x)[0], expected[0])


@torch.library.custom_op("lightning_remat_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x * by


@scaled.register_fake
def _(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _keep_without_saving(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.by = inputs[1]


def _scaled_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gradient * ctx.by.sum(), None


scaled.register_autograd(_scaled_backward, setup_context=_keep_without_saving)


class ScaledBy(nn.Module):
    """Its operation keeps an input on `ctx`, where no saved-tensor hook sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(self.linear(x), x.exp()).sigmoid()


def test_what_a_custom_operation_keeps_by_itself_does_not_sleep() -> None:
    plain, x = ScaledBy(), torch.randn(8, 4)
    ours = copy.deepcopy(plain)
    traced = rewrite(ours, Schedule.parse("F0 F1 F2 D1 F1 D0 D1 F3 D2 B3 D3 B2 B1 B0"), x)
    assert [o.kind for o in traced.operations] == ["linear", "exp", "scaled", "sigmoid"]
    assert_equal_traces(traces(plain, [x]), traces(ours, [x]))


class Gates(nn.Module):
    """Two gates are views of one sum, as in a recurrent cell; the second is read late."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.mix = nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.a(x) + self.b(x)).chunk(2, dim=1)
        return self.mix(first.sigmoid()) * second.tanh()


def test_views_made_again_within_the_forward_hold_no_base() -> None:
    module, x = Gates(), torch.randn(512, 64)
    graph = profile(trace(module, x), x, repeats=1)
    kinds = ["linear", "linear", "add", "chunk", "getitem", "getitem", "sigmoid", "linear", "tanh", "mul"]
    assert [node.kind for node in graph.nodes] == kinds
    forward = "F0 F1 F2 F3 F4 F5 F6 D0 D1 D2 D3 D4 D5 F7 F0 F1 F2 F3 F5 F8 D0 D1 D2 D3 D5 F9"
    schedule = Schedule.parse(f"{forward} B9 B8 B7 B6 B5 B4 B3 B2 B1 B0 D6 D7 D8 D9")
    schedule = apply_liveness(graph, schedule)
    plain = copy.deepcopy(module)
    rewrite(module, schedule, x)
    assert step_peak(module, x) == simulate(graph, schedule).peak_bytes  # in the forward, before the loss
    assert_equal_traces(traces(plain, [x]), traces(module, [x]))
