"""Code that asks about sizes, makes tensors, writes buffers: captured as it runs, or not captured at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_steps import assert_equal_traces, traces

from lightning_remat import Graph, Schedule, TraceError, profile, rematerialize, trace
from lightning_remat.lowering import lower_kept


def keep_nothing(graph: Graph, budget_bytes: int) -> Schedule:
    """Everything is computed again, from the inputs."""
    return lower_kept(graph, ())


def rematerialized(module: nn.Module, *args: Any) -> Any:
    """A copy of the module that recomputes all that its backward reads."""
    ours = copy.deepcopy(module)
    assert rematerialize(ours, *args, memory_budget=1 << 30, planner=keep_nothing).num_recomputed > 0
    return ours


def kinds(module: nn.Module, *args: Any) -> list[str]:
    return [operation.kind for operation in trace(module, *args).operations]


class Asks(nn.Module):
    """Heads as transformers write them: sizes unpacked, compared, and asked for by `isinstance` and `len`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        assert isinstance(x.shape, tuple)
        assert not hasattr(x, "extra")
        y = self.inner(x).sigmoid().view(*x.shape[:-1], -1, 3)
        if len(y.shape) == 4 and y.shape[1] % 2 == 0:
            y = y.transpose(1, 2)
        heads = [part.sigmoid() for part in y.split(int(3 * 0.5), dim=-1)]
        return self.outer(torch.cat(heads, -1).reshape(x.shape).sigmoid())


def test_sizes_are_answered_and_the_batch_size_stays_free() -> None:
    x = torch.randn(4, 6, 6)
    plain, traced = Asks(), trace(Asks(), x)
    assert {"transpose", "split", "cat"} <= {o.kind for o in traced.operations}
    smaller = torch.randn(2, 6, 6)
    assert profile(traced, smaller, repeats=1).input_bytes == smaller.nbytes
    ours = rematerialized(plain, x)
    batches = [x, smaller]
    assert_equal_traces(traces(plain, batches), traces(ours, batches))


def test_other_sizes_that_decide_otherwise_run_plainly() -> None:
    x, odd = torch.randn(4, 6, 6), torch.randn(4, 5, 6)
    plain = Asks()
    with pytest.raises(ValueError, match="decides on inputs of these sizes or types otherwise"):
        profile(trace(plain, x), odd)
    ours = rematerialized(plain, x)
    with pytest.warns(UserWarning, match="decides on inputs of these sizes or types otherwise"):
        found = ours(odd)
    assert torch.equal(found, plain(odd))
    assert_equal_traces(traces(plain, [x]), traces(ours, [x]))


class MakesTensors(nn.Module):
    """Positions and masks from sizes; a decision by numbers that follow from sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=self.embedding.weight.device) + 1
        if (positions.diff() == 1).all():
            positions = positions - 1
        kept = torch.zeros(x.shape[0], x.shape[1], 4)
        kept[:, 1:] = (x + self.embedding(positions)).sigmoid()[:, 1:]
        return kept.sigmoid()


def test_tensors_made_from_sizes_follow_the_sizes() -> None:
    plain = MakesTensors()
    batches = [torch.randn(n, 5, 4) for n in (3, 2)]
    ours = rematerialized(plain, batches[0])
    assert_equal_traces(traces(plain, batches), traces(ours, batches))


class RunningMean(nn.Module):
    """A buffer written and read by operations of its own, one of them without any traced argument."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        before = (x + self.mean).sigmoid().sigmoid()
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.linear((before - self.mean).sigmoid().sigmoid())


def test_buffers_written_by_operations() -> None:
    plain, x = RunningMean(), torch.randn(3, 4)
    trace(plain, x)
    assert torch.equal(plain.mean, torch.ones(4))
    ours = rematerialized(plain, x)
    assert_equal_traces(traces(plain, [x, x + 1]), traces(ours, [x, x + 1]))


class AsksABuffer(nn.Module):
    """A decision by a buffer's value, which another step may find changed."""

    started: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("started", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.started == 0:
            x = x * 2
        return x.sigmoid()


class WritesUnseen(nn.Module):
    """Writes into a constant after an operation that reads it."""

    def forward(self, x: Tensor) -> Tensor:
        table = torch.zeros(4)
        x = x + table
        table.add_(1)
        return x * table


@pytest.mark.parametrize(("make", "message"), [(AsksABuffer, "depends on the values"), (WritesUnseen, "in place into")])
def test_what_a_trace_would_freeze_is_one_operation_or_refused(make: Callable[[], nn.Module], message: str) -> None:
    x = torch.randn(3, 4)
    with pytest.raises(TraceError, match=message):
        trace(make(), x)
    assert kinds(nn.Sequential(nn.Linear(4, 4), make()), x)[0] == "linear"


@dataclass
class Pair:
    """Not known to pytrees."""

    first: Tensor
    rest: dict[str, Any]


class Nests(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: Pair) -> tuple[Pair, int]:
        y = self.linear(pair.first).sigmoid().sigmoid()
        return Pair(y, {"sum": y + pair.rest["other"], "none": None}), len(y)


def test_dataclasses_go_in_and_come_out() -> None:
    plain, pair = Nests(), Pair(torch.randn(3, 4), {"other": torch.randn(3, 4)})
    ours = rematerialized(plain, pair)
    (found, count), (expected, _) = ours(pair), plain(pair)
    assert (type(found), count, found.rest["none"]) == (Pair, 3, None)
    assert torch.equal(found.rest["sum"], expected.rest["sum"])
    found.rest["sum"].sum().backward()
    expected.rest["sum"].sum().backward()
    assert torch.equal(ours.linear.weight.grad, plain.linear.weight.grad)
