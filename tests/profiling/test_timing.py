"""Seconds of operations, by a clock that the operations themselves move on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import profile, trace
from lightning_remat.capture.tracer import recapture
from lightning_remat.measure.stopwatch import Stopwatch
from lightning_remat.module_state.own_draws import OwnDraws
from lightning_remat.profiling.profiler import profile_call
from lightning_remat.profiling.single_runs import SingleRuns


class Clock:
    """Stands still but for the work of `Work`; a burst of other work makes what falls into it ten times as long."""

    def __init__(self, burst: range) -> None:
        self.now, self.calls, self.burst = 0.0, 0, burst

    def __call__(self) -> float:
        return self.now


CLOCKS: list[Clock] = []


@torch.library.custom_op("remat_tests::work", mutates_args=())
def work(x: Tensor, seconds: float) -> Tensor:
    clock = CLOCKS[-1]
    clock.now += seconds * (10 if clock.calls in clock.burst else 1)
    clock.calls += 1
    return x * 2


@work.register_fake
def no_work(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


work.register_autograd(lambda _ctx, gradient: (gradient * 2, None))


class Work(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return work(x, self.seconds)


def timed(clock: Clock, monkeypatch: pytest.MonkeyPatch, costs: tuple[float, ...]) -> tuple[list[float], int]:
    """Seconds of the nodes, and in how many passes they were measured."""
    monkeypatch.setattr("lightning_remat.measure.stopwatch.time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr("lightning_remat.profiling.timing.time", SimpleNamespace(perf_counter=clock))
    module = nn.Sequential(*(Work(seconds) for seconds in costs))
    per_pass = 2  # of forwards, and of backwards
    CLOCKS.append(clock)
    x = torch.randn(3, requires_grad=True)
    traced = trace(module, x)
    clock.calls = 0
    one = profile(traced, x, repeats=1)
    runs_of_bytes = clock.calls - per_pass * len(one.nodes)
    clock.calls = -runs_of_bytes  # the timed runs count from 0
    nodes = profile(traced, x).nodes
    return [n.forward_seconds for n in nodes], clock.calls // (per_pass * len(nodes))


def test_a_burst_of_other_work_does_not_change_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = (0.01, 0.02, 0.03, 0.04)
    # As long as three passes: every run of a node within one pass would fall into it.
    seconds, passes = timed(Clock(range(1, 25)), monkeypatch, costs)
    assert seconds == pytest.approx(costs)
    assert passes == 5


def test_slow_operations_are_timed_in_fewer_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, passes = timed(Clock(range(0)), monkeypatch, (3.0, 0.5))
    assert seconds == pytest.approx([3.0, 0.5])
    assert passes == 2


@torch.library.custom_op("remat_tests::cold", mutates_args=())
def cold(x: Tensor) -> Tensor:
    CLOCKS[-1].calls = 0
    return x * 2


@cold.register_fake
def no_cold(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def warm(_ctx: object, gradient: Tensor) -> Tensor:
    """Takes three microseconds where a forward has run just before, and one where another backward has."""
    clock = CLOCKS[-1]
    clock.now += 1e-6 if clock.calls else 3e-6
    clock.calls += 1
    return gradient * 2


cold.register_autograd(warm)


class Cold(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return cold(x)


# Each holds 12 bytes, the first the gradient of the input beside.
@pytest.mark.parametrize(
    ("together_bytes", "expected"), [(2**24, [1.5] * 4), (36, [2.0] * 4), (24, [3.0, 2.0, 2.0, 3.0]), (0, [3.0] * 4)]
)
def test_backwards_that_hold_little_are_timed_as_they_follow_one_another(
    together_bytes: int, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(range(0))
    CLOCKS.append(clock)
    monkeypatch.setattr("lightning_remat.measure.stopwatch.time", SimpleNamespace(perf_counter=clock))
    x = torch.randn(3, requires_grad=True)
    traced = trace(nn.Sequential(*(Cold() for _ in range(4))), x)
    graph = profile_call(*recapture(traced, (x,), {}), [x], together_bytes=together_bytes)
    assert [1e6 * n.backward_seconds for n in graph.nodes] == pytest.approx(expected)


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(x.sigmoid(), 0.5)
        return nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=0.5)


def test_what_it_takes_to_ask_where_to_draw_from_is_none_of_an_operations_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, asked = Clock(range(0)), OwnDraws.__torch_dispatch__

    def asks(*args: Any) -> Any:  # nothing else takes time
        clock.now += 1.0
        return asked(*args)

    monkeypatch.setattr(OwnDraws, "__torch_dispatch__", asks)
    monkeypatch.setattr("lightning_remat.measure.stopwatch.time", SimpleNamespace(perf_counter=clock))
    x = torch.randn(2, 4, 8, requires_grad=True)
    nodes = profile(trace(Drawing(), x), x).nodes
    assert sum(node.is_random for node in nodes) == 2
    assert clock.now > 5 * 5, "five passes"
    assert [node.forward_seconds for node in nodes] == pytest.approx([0.0] * 3)


@torch.library.custom_op("remat_tests::fresh", mutates_args=())
def fresh(x: Tensor) -> Tensor:
    """Takes three microseconds where something else has been done since the last one, such as looking at the clock."""
    clock = CLOCKS[-1]
    clock.now += 3e-6 if clock.calls else 1e-6
    clock.calls = 0
    return x * 2


@fresh.register_fake
def no_fresh(x: Tensor) -> Tensor:
    return torch.empty_like(x)


fresh.register_autograd(lambda _ctx, gradient: gradient * 2)


class Fresh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return fresh(x)


class ReadClock(Clock):
    """Counts how often it is looked at."""

    def __call__(self) -> float:
        self.calls += 1
        return super().__call__()


@pytest.mark.parametrize(
    ("between", "together_bytes", "expected"),
    [
        ([], 2**24, [1.5] * 4),
        ([], 36, [2.0] * 4),
        ([], 0, [3.0] * 4),
        ([nn.Dropout()], 2**24, [2.0, 2.0, 0.0, 2.0, 2.0]),  # in two pieces, which what draws lies between
    ],
)
def test_forwards_that_hold_little_are_timed_as_they_follow_one_another(
    between: list[nn.Module], together_bytes: int, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ReadClock(range(0))
    CLOCKS.append(clock)
    monkeypatch.setattr("lightning_remat.measure.stopwatch.time", SimpleNamespace(perf_counter=clock))
    x = torch.randn(3, requires_grad=True)
    traced = trace(nn.Sequential(Fresh(), Fresh(), *between, Fresh(), Fresh()), x)
    graph = profile_call(*recapture(traced, (x,), {}), [x], together_bytes=together_bytes)
    assert [1e6 * n.forward_seconds for n in graph.nodes] == pytest.approx(expected)


@torch.library.custom_op("remat_tests::trained", mutates_args=())
def trained(x: Tensor) -> Tensor:
    """Takes three microseconds where values have been put away since the last backward, and one right after that."""
    CLOCKS[-1].now += 1e-6 if CLOCKS[-1].calls else 3e-6
    return x * 2


@trained.register_fake
def not_trained(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def trained_backward(_ctx: object, gradient: Tensor) -> Tensor:
    CLOCKS[-1].calls = 1
    return gradient * 2


trained.register_autograd(trained_backward)


class Trained(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return trained(x)


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (nn.Identity(), [1.0] * 4),
        (nn.Dropout(), [1.0, 1.0, 0.0, 3.0, 3.0]),  # what draws is put away by itself
        (nn.BatchNorm1d(3), [3.0, 3.0, 0.0, 3.0, 3.0]),  # its buffers would be written once more
    ],
)
def test_what_follows_one_another_is_timed_as_in_a_second_step(
    between: nn.Module, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, keep = Clock(range(0)), SingleRuns.keep

    def put_away(*args: Any) -> None:
        clock.calls = 0
        keep(*args)

    CLOCKS.append(clock)
    monkeypatch.setattr(SingleRuns, "keep", put_away)
    monkeypatch.setattr("lightning_remat.measure.stopwatch.time", SimpleNamespace(perf_counter=clock))
    x = torch.randn(4, 3, requires_grad=True)
    graph = profile(trace(nn.Sequential(Trained(), Trained(), between, Trained(), Trained()), x), x)
    assert [1e6 * n.forward_seconds for n in graph.nodes] == pytest.approx(expected)


@torch.library.custom_op("remat_tests::recorded", mutates_args=())
def recorded(x: Tensor) -> Tensor:
    CLOCKS[-1].now += 2e-6
    return x * 2


@recorded.register_fake
def not_recorded(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def note_record(*_: Any, **__: Any) -> None:
    CLOCKS[-1].now += 1e-6


recorded.register_autograd(lambda _ctx, gradient: gradient * 2, setup_context=note_record)


class Recorded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return recorded(x)


@pytest.mark.parametrize(("together_bytes", "recording"), [(2**24, 1.0), (0, 0.0)])
def test_what_autograd_takes_to_record_short_forwards_is_told(
    together_bytes: int, recording: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    CLOCKS.append(Clock(range(0)))
    monkeypatch.setattr("lightning_remat.measure.stopwatch.time", SimpleNamespace(perf_counter=CLOCKS[-1]))
    x = torch.randn(3, requires_grad=True)
    traced = trace(nn.Sequential(Recorded(), Recorded()), x)
    graph = profile_call(*recapture(traced, (x,), {}), [x], together_bytes=together_bytes)
    assert [1e6 * n.forward_seconds for n in graph.nodes] == pytest.approx([3.0] * 2)
    assert [1e6 * n.recording_seconds for n in graph.nodes] == pytest.approx([recording] * 2)


class ReadsSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.norm(x.sigmoid())
        return (y * torch.ones(y.size())).tanh().chunk(2, 1)


def test_a_piece_makes_what_its_operations_make_one_by_one() -> None:
    module, x = ReadsSizes(), torch.randn(9, 4, requires_grad=True)
    called, values = recapture(trace(module, x), (x,), {})
    assert called.constants, "a size that becomes known within the piece"
    runs = SingleRuns(called, values, is_fake=False)
    everything = range(len(runs.operations))
    assert [*runs.pieces(everything)] == [everything]
    *_, first, second = runs.run_together(everything, {}, Stopwatch(x.device))
    found, expected = [*first, *second], module(x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    gradients = [torch.autograd.grad([t.sum() for t in tensors], x)[0] for tensors in (found, expected)]
    assert torch.equal(*gradients)
