"""What a recomputation costs beside its kernels, as the executor of this process on this machine does it."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from ..capture.dynamo import CapturedGraph, forward_of
from ..capture.tracer import traced_graph
from ..lowering import lower_kept
from ..profiling.profiler import profile_call
from .forward import run_forward
from .program import Program, compile_schedule

_DEPTH, _WIDTH = 128, 16
_APART = 16
"""Operations between two recomputations: after one another they find the processor's caches warm, as in no step."""

_ROUNDS = 15


@cache
def rerun_price() -> float:
    """Processor time of the launching thread for one recomputation, that of the operation itself left out.

    A chain of operations on tiny tensors is run with some operations recomputed, in turn with all kept. What differs is
    the work of the executor, which is the host's whatever the device.
    """
    values = [torch.ones(_WIDTH, _WIDTH, requires_grad=True) for _ in range(_DEPTH + 1)]
    traced = traced_graph(_NOTHING, forward_of(_NOTHING), CapturedGraph(_chain()), values, values)
    assert traced is not None
    graph = profile_call(traced, values, values, repeats=2)
    count = len(graph.nodes)
    again = list(range(1, count - 1, _APART))
    programs = [
        compile_schedule(traced, lower_kept(graph, keep), graph)
        for keep in (range(count), set(range(count)) - set(again))
    ]
    for program in programs:
        _seconds(program, values)  # what is learned in a first run
    rounds = [[_seconds(program, values) for program in programs] for _ in range(_ROUNDS)]
    keeping, recomputing = map(min, zip(*rounds, strict=True))
    return max(0.0, (recomputing - keeping - sum(graph.nodes[n].forward_seconds for n in again)) / len(again))


_NOTHING = nn.Identity()
"""The module of a graph that was written down and captured nowhere."""


def _chain() -> fx.GraphModule:
    graph = fx.Graph()
    h, *weights = [graph.placeholder(f"v{k}") for k in range(_DEPTH + 1)]
    for weight in weights:
        h = graph.call_function(torch.sigmoid, (graph.call_function(nn.functional.linear, (h, weight)),))
    graph.output((h,))
    return fx.GraphModule({}, graph)


def _seconds(program: Program, values: list[Any]) -> float:
    start = time.thread_time()
    with torch.enable_grad():
        (out,) = run_forward(program, list(values))
        torch.autograd.grad(out.sum(), values)
    return time.thread_time() - start
