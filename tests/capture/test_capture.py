"""Code that asks about sizes, makes tensors, writes buffers: captured as it runs, or not captured at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rewriting import rematerialized_copy
from torch import Tensor, nn
from training_steps import assert_equal_traces, traces

from lightning_remat import TraceError, profile, rematerialize, trace


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


@pytest.mark.slow
def test_sizes_are_answered_and_the_batch_size_stays_free() -> None:
    x = torch.randn(4, 6, 6)
    plain, traced = Asks(), trace(Asks(), x)
    assert {"transpose", "split", "cat"} <= {o.kind for o in traced.operations}
    smaller = torch.randn(2, 6, 6)
    assert profile(traced, smaller, repeats=1).input_bytes == smaller.nbytes
    ours = rematerialized_copy(plain, x)
    batches = [x, smaller, torch.randn(7, 6, 6)]
    assert_equal_traces(traces(plain, batches), traces(ours, batches))


@pytest.mark.slow
def test_other_sizes_that_decide_otherwise_are_captured_anew() -> None:
    x, odd = torch.randn(4, 6, 6), torch.randn(4, 5, 6)
    plain = Asks()
    with pytest.raises(ValueError, match="decides on inputs of these sizes or types otherwise"):
        profile(trace(plain, x), odd)
    ours = rematerialized_copy(plain, x)
    batches = [x, odd, x, odd]
    assert_equal_traces(traces(plain, batches), traces(ours, batches))


class MakesTensors(nn.Module):
    """Positions and masks from sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=self.embedding.weight.device)
        kept = torch.zeros(x.shape[0], x.shape[1], 4)
        kept[:, 1:] = (x + self.embedding(positions)).sigmoid()[:, 1:]
        return kept.sigmoid()


def test_tensors_made_from_sizes_follow_the_sizes() -> None:
    plain = MakesTensors()
    batches = [torch.randn(n, 5, 4) for n in (3, 2)]
    ours = rematerialized_copy(plain, batches[0])
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
    ours = rematerialized_copy(plain, x)
    assert_equal_traces(traces(plain, [x, x + 1]), traces(ours, [x, x + 1]))


class AsksABuffer(nn.Module):
    """A decision by a buffer's value, which another step may find changed."""

    started: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("started", torch.zeros(()))
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sigmoid().exp().sigmoid()
        if self.started == 0:
            x = x * 2
        self.started += 1
        return self.last(x.sigmoid().exp().sigmoid())


@pytest.mark.slow
def test_nested_tensors_are_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    parts = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)], layout=torch.jagged)
    with pytest.raises(TraceError, match=r"nested tensor of 2 parts.*Remedy: pad it"):
        rematerialize(module, parts, memory_budget="80%")
    assert "forward" not in vars(module)


@pytest.mark.slow
def test_a_decision_by_a_buffer_is_taken_in_every_step() -> None:
    x = torch.randn(256, 4)
    plain = AsksABuffer()
    with pytest.raises(TraceError, match=r"cannot be captured as one graph.*Remedy"):
        trace(plain, x)
    ours = rematerialized_copy(plain, x)
    for module in (plain, ours):
        assert module.started == 0
    assert_equal_traces(traces(plain, [x] * 3), traces(ours, [x] * 3))
    assert ours.started == 3


class WritesBetween(nn.Module):
    """Writes into a constant after an operation that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        table = torch.zeros(4)
        x = (self.layer(x) + table).sigmoid()
        table.add_(1)
        return x * table.exp()


def test_a_constant_that_is_written_after_it_was_read() -> None:
    plain, x = WritesBetween(), torch.randn(3, 4)
    ours = rematerialized_copy(plain, x)
    assert_equal_traces(traces(plain, [x] * 2), traces(ours, [x] * 2))


class CountsAndReads(nn.Module):
    """A buffer written first, read by what a later write is fused with, and written again."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y = self.linear(x * self.count).sigmoid()
        z = y * 2
        self.count.mul_(0.5)
        z += self.count
        return (z * self.count).sigmoid().sigmoid()


def test_a_buffer_that_is_read_between_writes() -> None:
    plain, x = CountsAndReads(), torch.randn(3, 4)
    ours = rematerialized_copy(plain, x)
    assert_equal_traces(traces(plain, [x] * 3), traces(ours, [x] * 3))


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
    ours = rematerialized_copy(plain, pair)
    (found, count), (expected, _) = ours(pair), plain(pair)
    assert (type(found), count, found.rest["none"]) == (Pair, 3, None)
    assert torch.equal(found.rest["sum"], expected.rest["sum"])
    found.rest["sum"].sum().backward()
    expected.rest["sum"].sum().backward()
    assert torch.equal(ours.linear.weight.grad, plain.linear.weight.grad)


def test_frames_of_another_language_are_no_reason() -> None:
    class Weighed(nn.Module):
        def forward(self, x: Tensor, weights: Tensor) -> Tensor:
            return torch.cov(x.sin(), aweights=weights)  # asks how many there are, whatever number stands for that

    with pytest.raises(TraceError, match=r"cannot be captured as one graph.*Remedy") as error:
        trace(Weighed(), torch.randn(2, 4), torch.rand(4))
    assert "frame #" not in str(error.value)


def test_an_operation_that_looks_at_values_is_named() -> None:
    class Heard(nn.Module):
        def forward(self, x: Tensor, window: Tensor) -> Tensor:
            return torch.istft(torch.view_as_complex(x), 8, window=window)  # asks whether it overlaps enough

    message = r"^istft asks for the values[^\n]*test_capture.py:\d+\)\. Remedy[^\n]*$"
    with pytest.raises(TraceError, match=message):
        trace(Heard(), torch.randn(2, 5, 6, 2), torch.hann_window(8))
