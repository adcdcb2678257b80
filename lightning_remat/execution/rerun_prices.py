"""What recomputations cost beside their kernels, as the executor of this process on this machine does them."""

from __future__ import annotations

import operator
import time
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from ..capture.dynamo import CapturedGraph, forward_of
from ..capture.tracer import traced_graph
from ..lowering import lower_kept
from ..profiling.profiler import profile_call
from .forward import run_forward
from .program import Program, compile_schedule

_BLOCKS, _WIDTH = 40, 16
_APART = 8
"""Blocks from one stretch to the next: right after one another they find the processor's caches warm, as in no step."""

_LONG = 4
"""Blocks of a long stretch."""

_ROUNDS = 25


class RerunPrices(NamedTuple):
    """Processor time of the launching thread, that of the operations themselves left out.

    Attributes:
        run: Of one recomputation.
        stretch: Of a stretch of them, beside that.
    """

    run: float
    stretch: float


@cache
def rerun_prices() -> RerunPrices:
    """What the executor adds to the operations that it runs again, which is the host's work whatever the device.

    Blocks of a transformer on tiny tensors are run with all kept, in turn with one operation in every few blocks
    recomputed alone, and with several blocks recomputed at once: what differs from the first, by how many runs and
    stretches, tells both prices.
    """
    values = [torch.ones(_WIDTH, _WIDTH, requires_grad=True)]
    values += [torch.ones(shape, requires_grad=True) for _ in range(_BLOCKS) for shape in _PARAMETERS]
    traced = traced_graph(_NOTHING, forward_of(_NOTHING), CapturedGraph(_transformer()), values, values)
    assert traced is not None
    graph = profile_call(traced, values, values, repeats=5)
    count = len(graph.nodes)
    size = count // _BLOCKS
    starts = range(0, count - _LONG * size, _APART * size)
    alone = [start + _ACTIVATION for start in starts]
    at_once = [n for start in starts for n in range(start, start + _LONG * size)]
    again = [[], alone, at_once]
    programs = [compile_schedule(traced, lower_kept(graph, {*range(count)} - {*runs}), graph) for runs in again]
    for program in programs:
        _seconds(program, values)  # what is learned in a first run
    rounds = [[_seconds(program, values) for program in programs] for _ in range(_ROUNDS)]
    own = [sum(graph.nodes[n].forward_seconds for n in runs) for runs in again]
    # Of differences within a round, as whatever else the machine does comes and goes.
    one, several = (median(seconds[k] - seconds[0] for seconds in rounds) - own[k] for k in (1, 2))
    run = max(0.0, (several - one) / (len(at_once) - len(alone)))
    return RerunPrices(run, max(0.0, one / len(alone) - run))


_NOTHING = nn.Identity()
"""The module of a graph that was written down and captured nowhere."""


_PARAMETERS = ((_WIDTH,), (_WIDTH,), (_WIDTH, _WIDTH), (_WIDTH, _WIDTH))
_ACTIVATION = 2
"""Its place among the operations of a block."""


def _transformer() -> fx.GraphModule:
    graph = fx.Graph()
    h, *weights = [graph.placeholder(f"v{k}") for k in range(1 + len(_PARAMETERS) * _BLOCKS)]
    for k in range(0, len(weights), len(_PARAMETERS)):
        scale, shift, up, down = weights[k : k + len(_PARAMETERS)]
        inner = graph.call_function(nn.functional.layer_norm, (h, (_WIDTH,), scale, shift))
        inner = graph.call_function(nn.functional.gelu, (graph.call_function(nn.functional.linear, (inner, up)),))
        h = graph.call_function(operator.add, (h, graph.call_function(nn.functional.linear, (inner, down))))
    graph.output((h,))
    return fx.GraphModule({}, graph)


def _seconds(program: Program, values: list[Any]) -> float:
    start = time.thread_time()
    with torch.enable_grad():
        (out,) = run_forward(program, list(values))
        torch.autograd.grad(out.sum(), values)
    return time.thread_time() - start
