"""No graph of autograd outlives the step that made it, and nothing that was captured of a module the module."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from remat_runs import network
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_remat import find_batch_size, rematerialize
from lightning_remat.execution.rewriter import programs_in


class Halves(nn.Module):
    """Decides on values between two graphs, the second of which gets what the first has computed."""

    def __init__(self) -> None:
        super().__init__()
        net = network()
        self.first, self.second = net[:9], net[9:]

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y if y.sum() > -1e9 else -y)


def held(module: nn.Module) -> list[str]:
    """The parameters of which a graph is alive: autograd's node for them is the same again, and has kept its mark."""
    gc.collect()
    for p in module.parameters():
        get_gradient_edge(p).node.metadata["mark"] = True
    return [name for name, p in module.named_parameters() if "mark" in get_gradient_edge(p).node.metadata]


def images() -> Tensor:
    return torch.randn(4, 3, 16, 16)


@pytest.mark.slow
def test_a_graph_that_is_alive_is_seen() -> None:
    net = network()
    loss = net(images()).sum()
    assert len(held(net)) == len(list(net.parameters()))
    del loss
    assert held(net) == []


@pytest.mark.slow
@pytest.mark.parametrize("make", [network, Halves])
def test_rematerializing_and_training_hold_no_graph(make: Callable[[], nn.Module]) -> None:
    net = make()
    rematerialize(net, images(), memory_budget="70%")
    assert held(net) == []
    for _ in range(2):
        net(images()).sum().backward()
    assert held(net) == []


@pytest.mark.slow
def test_a_search_for_a_batch_size_holds_no_graph() -> None:
    net = Halves()
    find_batch_size(net, images(), lambda x: net(x).sum(), memory_budget="3MiB", max_batch_size=8)
    assert held(net) == []


def captured_of(net: nn.Module) -> list[weakref.ref[Any]]:
    """The graphs of a module that has trained a step."""
    rematerialize(net, images(), memory_budget="70%")
    net(images()).sum().backward()
    return [weakref.ref(program.traced.captured) for program in programs_in(net)]


def test_what_was_captured_of_a_module_goes_with_it() -> None:
    captured = captured_of(network())
    assert captured
    for _ in range(4):  # of the module, then of what was known of it, which had it as a key
        gc.collect()
    assert [graph() for graph in captured if graph() is not None] == []
