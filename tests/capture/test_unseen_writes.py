"""What older versions of torch capture otherwise, as graphs that any version runs."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from lightning_remat.capture.dynamo import _put_inputs_first
from lightning_remat.capture.unseen_writes import exchange_data, set_apart


def _lower_version_count_by_1(tensor: Tensor) -> Tensor:
    """As torch until 2.13 defines it within its capture."""
    return tensor


def test_two_calls_that_exchange_data_are_one() -> None:
    graph = fx.Graph()
    held, x = graph.placeholder("held"), graph.placeholder("x")
    written = graph.call_function(torch.Tensor.set_, (held, graph.call_function(torch.exp, (x,))))
    graph.call_function(_lower_version_count_by_1, (written,))
    graph.output(graph.call_function(torch.mul, (held, 2)))
    set_apart(graph)
    graph.lint()
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [torch.exp, exchange_data, torch.mul]
    tensor, x = torch.zeros(3), torch.randn(3)
    out = fx.GraphModule({}, graph)(tensor, x)
    assert tensor._version == 0
    assert torch.equal(tensor, x.exp())
    assert torch.equal(out, 2 * x.exp())


def test_inputs_stand_before_what_reads_them() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    early = graph.call_function(torch.neg, (x,))
    late = graph.placeholder("late")
    early.args = (late,)
    graph.output(graph.call_function(torch.add, (early, x)))
    _put_inputs_first(graph)
    graph.lint()
    assert [n.name for n in graph.nodes][:2] == ["x", "late"]
