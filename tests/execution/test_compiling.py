"""Recomputed stretches that `torch.compile` is given."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from resting_cases import rested
from rewriting import recomputing_copy, rewrite
from torch import Tensor, fx, nn
from torch.nn import functional
from training_steps import assert_equal_traces, traces

from lightning_remat import compile_stretches, profile, rematerialize, restore, trace
from lightning_remat.lowering import lower_kept


class Block(nn.Module):
    """Parts of which most run again, batch norm and a view among them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).sigmoid().mul(2).chunk(2, -1)
        h = self.norm(torch.cat([torch.relu(a), torch.tanh(b)], -1))
        return x + self.second(functional.gelu(h).view(-1, x.shape[-1]))


class Counting:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.num_runs = 0

    def __call__(self, module: fx.GraphModule, _examples: Any) -> Any:
        self.graphs.append(module)

        def run(*args: Any) -> Any:
            self.num_runs += 1
            assert not torch.is_grad_enabled()
            return module(*args)

        return run


def blocks() -> tuple[nn.Module, nn.Module, Tensor]:
    """A network and its copy, which keeps what linear maps return."""
    plain, x = nn.Sequential(*(Block(8) for _ in range(4))), torch.randn(16, 8)
    ours = copy.deepcopy(plain)
    graph = profile(trace(ours, x), x, repeats=1)
    kept = {n for n, node in enumerate(graph.nodes) if node.kind in ("linear", "batch_norm")}
    rewrite(ours, lower_kept(graph, kept), x)
    return plain, ours, x


@pytest.mark.slow
def test_repeated_blocks_are_compiled_once_and_compute_the_same() -> None:
    plain, ours, x = blocks()
    counting = Counting()
    given = compile_stretches(ours, backend=counting)
    assert not counting.graphs, "it is compiled when it runs"
    assert_equal_traces(traces(plain, [x, x.flip(0), x]), traces(ours, [x, x.flip(0), x]))
    assert rested(ours)
    assert counting.num_runs == 3 * given
    assert 0 < len(counting.graphs) < given


@pytest.mark.slow
def test_what_brings_a_tape_or_draws_stays_as_it_is() -> None:
    layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Tanh()) for _ in range(4)]
    plain, x, backend = nn.Sequential(*layers), torch.randn(16, 8), Counting()
    ours = recomputing_copy(plain, x)
    compile_stretches(ours, backend=backend)
    torch.manual_seed(1)
    expected = traces(plain, [x, x])
    torch.manual_seed(1)
    assert_equal_traces(expected, traces(ours, [x, x]))
    assert backend.num_runs
    compiled = {str(n.target) for graph in backend.graphs for n in graph.graph.nodes}
    assert any("tanh" in name for name in compiled)
    assert not any("dropout" in name or "layer_norm" in name for name in compiled)


@pytest.mark.slow
def test_other_sizes_and_copies_train_on() -> None:
    plain, ours, x = blocks()
    compile_stretches(ours, backend=Counting())
    twin = copy.deepcopy(ours)
    batches = [x, x[:5], x[:7], x]
    expected = traces(plain, batches)
    assert_equal_traces(expected, traces(ours, batches))
    assert_equal_traces(expected, traces(twin, batches))


class Turning(nn.Module):
    """Something that is captured when it is met."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Tanh()) for _ in range(6)))

    def forward(self, x: Tensor, turn: bool = False) -> Tensor:
        return self.layers(x).sin() if turn else self.layers(x)


@pytest.mark.slow
def test_what_is_captured_later_is_compiled_too() -> None:
    plain, x = Turning(), torch.randn(64, 8)
    ours = copy.deepcopy(plain)
    rematerialize(ours, x, memory_budget="70%")
    counting = Counting()
    compile_stretches(ours, backend=counting)
    for turn in (False, True):
        before = counting.num_runs
        for module in (plain, ours):
            module(x, turn=turn).square().sum().backward()
        assert counting.num_runs > before
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)


@pytest.mark.slow
def test_what_is_not_rematerialized_is_refused() -> None:
    module, x = Turning(), torch.randn(64, 8)
    with pytest.raises(ValueError, match=r"Turning is not rematerialized\. Remedy: call rematerialize first"):
        compile_stretches(module)
    rematerialize(module, x, memory_budget="70%")
    restore(module)
    with pytest.raises(ValueError, match="is not rematerialized"):
        compile_stretches(module)


@pytest.mark.slow
def test_the_default_compiler_is_as_exact_as_it_is_on_the_plain_stretch() -> None:
    """Activations of which it makes the same bits train bit by bit; others within rounding."""
    for activation, is_exact in ((nn.ReLU(), True), (nn.GELU(), False)):
        layers = [nn.Sequential(nn.Linear(8, 8), activation, nn.Hardtanh(-0.5, 0.5)) for _ in range(6)]
        plain, x = nn.Sequential(*layers), torch.randn(64, 8)
        ours = copy.deepcopy(plain)
        rematerialize(ours, x, memory_budget="60%")
        compile_stretches(ours)
        expected, found = traces(plain, [x, x]), traces(ours, [x, x])
        if is_exact:
            assert_equal_traces(expected, found)
        else:
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, msg=name)
