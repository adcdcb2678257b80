"""What recomputations cost beside their kernels, as the executor of this process on this machine does them."""

from __future__ import annotations

import gc
import operator
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from scipy import optimize  # pyright: ignore[reportMissingTypeStubs]
from torch import fx, nn
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from ..capture.dynamo import CapturedGraph
from ..capture.forwards import forward_of
from ..capture.tracer import traced_graph
from ..devices import HOST
from ..lowering import lower_kept
from ..profiling.profiler import profile_call
from ..schedules.graph import Graph, Node, fields_in
from ..schedules.schedule import Schedule
from ..schedules.simulator import simulate
from .assembly import compile_schedule
from .forward import run_forward
from .program import Program

_BLOCKS, _WIDTH = 10, 16
_APART = 2
"""Blocks from one stretch to the next: right after one another they find the processor's caches warm, as in no step."""

_LONG = 2
"""Blocks of a long stretch, the next of which is twice as far away."""

_ROUNDS, _MOST_ROUNDS = 20, 80
"""How many come at a time, and in all."""

_AGREE = 0.03
"""By what part of a step earlier and later rounds may differ; all prices together are a fifth of one or more."""

_STEPS = 5
"""Of which the fastest tells how fast the machine is, as of passes over the operations that are profiled."""

_STORAGES_OF_A_NORM = 2
"""Its mean and its deviation."""


class RerunPrices(NamedTuple):
    """Processor time of the launching thread, that of the operations themselves left out.

    Attributes:
        run: Of one recomputation.
        rest: Of one whose output some backward reads, beside that: it gives up its memory and gets it again.
        own_rest: Of one whose own backward is among these, beside that, as of a sigmoid: it rests by its storage.
        stretch: Of a stretch of them, beside that.
        tape: Of one that brings its tape, as a layer norm does, beside that; another asks for more or less, by how many
            storages it is in. One that draws random numbers asks for it (again) beside its tape.
        hook: Of an operation of whose saved tensors some are discarded, however many it saves: that it is run apart
            from its neighbours costs more than each hook.
    """

    run: float
    rest: float
    own_rest: float
    stretch: float
    tape: float
    hook: float

    def put_on(self, graph: Graph) -> Graph:
        """The graph with these prices."""
        read = {i for node in graph.nodes for i in node.saved}

        def priced(n: int, node: Node) -> Node:
            rests = self.rest * (n in read) + self.own_rest * (n in node.saved)
            return replace(
                node,
                rerun_price=self.run + rests + self.tape * node.is_random,
                stretch_price=self.stretch,
                tape_price=self.tape * _norms_in(node) if node.tape_bytes else 0.0,
                hook_price=self.hook if node.num_saved else 0.0,
            )

        return replace(graph, nodes=tuple(map(priced, range(len(graph.nodes)), graph.nodes)))


def rerun_prices() -> RerunPrices:
    """What the executor adds to the operations that it runs again, which is the host's work whatever the device.

    It is measured once; how fast the machine is, each time: one that others use, too, is half as fast in some minutes,
    and what was profiled in one is told by prices of it.
    """
    parts, step = _measured()
    with _undisturbed():
        seconds = min(step() for _ in range(_STEPS))
    return RerunPrices(*(part * seconds for part in parts))


@cache
def _measured() -> tuple[RerunPrices, Callable[[], float]]:
    """Prices in parts of a step, and what runs that step and tells its seconds.

    Blocks of a transformer on tiny tensors are run with all kept, which is the step, in turn with one operation in
    every few blocks recomputed alone, whose output rests, or which has a tape, or saves its own output and needs hooks,
    with several of which all outputs rest, for other operations or for their own, and with several blocks recomputed at
    once: what differs from the first, by how many of each there are, tells the prices.
    """
    with _undisturbed():
        return _solved()


def _solved() -> tuple[RerunPrices, Callable[[], float]]:
    shapes = [(_WIDTH, _WIDTH), *_PARAMETERS * _BLOCKS]
    values = [torch.ones(shape, dtype=torch.float32, device=HOST, requires_grad=True) for shape in shapes]
    traced = traced_graph(_NOTHING, forward_of(_NOTHING), CapturedGraph(_transformer()), values, values)
    assert traced is not None
    graph = profile_call(traced, values, values, with_kernels=False)
    count = len(graph.nodes)
    size = count // _BLOCKS
    starts = range(0, count - _LONG * size, _APART * size)
    at_once = [n for start in starts[::_LONG] for n in range(start, start + _LONG * size)]
    results = range(size - _RESULTS, size)
    some = [_NORM], [_PROJECTION], [_ACTIVATION], range(_PROJECTION, _ACTIVATION - 1), results
    again = [[], *([start + n for start in starts for n in places] for places in some), at_once]
    schedules = [lower_kept(graph, {*range(count)} - {*runs}) for runs in again]
    programs = [compile_schedule(traced, schedule, graph) for schedule in schedules]
    for program in programs * 2:
        _seconds(program, values)  # what is learned in a first run, and in one in which something rests
    contenders = [partial(_seconds, program, values) for program in programs]
    ratios = _ratios_of(contenders)
    profiled = simulate(graph, schedules[0]).seconds
    own = [sum(graph.nodes[n].rerun_seconds for n in runs) / profiled for runs in again[1:]]
    counts = [[_count(graph, schedule, price) for price in RerunPrices._fields] for schedule in schedules]
    beside = np.array(ratios[1:]) - 1 - np.array(own)
    prices: list[float] = cast(Any, optimize).nnls(np.array(counts[1:]), beside)[0].tolist()
    return RerunPrices(*prices), contenders[0]


def _ratios_of(contenders: Sequence[Callable[[], float]]) -> list[float]:
    """How many times as long as the first each takes within a round, by the median.

    Rounds go on until later ones tell what earlier ones did. Where some minutes are slow, single contenders may find
    none that is not: their least seconds scatter twice as much.
    """
    rounds = list[list[float]]()
    while True:
        rounds += [[seconds() for seconds in contenders] for _ in range(_ROUNDS)]
        halves = rounds[: len(rounds) // 2], rounds[len(rounds) // 2 :]
        is_same = all(abs(a - b) <= _AGREE for a, b in zip(*map(_medians, halves), strict=True))
        if (is_same and len(rounds) > _ROUNDS) or len(rounds) >= _MOST_ROUNDS:
            return _medians(rounds)


def _medians(rounds: Iterable[Sequence[float]]) -> list[float]:
    """Of the seconds in each round, in parts of the first in it."""
    return [statistics.median(of_one) for of_one in zip(*([s / row[0] for s in row] for row in rounds), strict=True)]


@contextmanager
def _undisturbed() -> Generator[None]:
    """Under none of the settings of the first that asks, as the prices serve all, and on one thread.

    Of tiny tensors several wait for one another, seconds long where other processes want the cores. OpenMP and MKL have
    such a number for each thread of Python; only one that begins meanwhile would take this one. A mode, as a default
    device is one, is asked at each call of PyTorch's, and a meter would count what is allocated here. What the process
    holds beside is searched for garbage as often as it is large.
    """
    threads, collects = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        with ExitStack() as stack:
            stack.enter_context(cast(Any, _disable_current_modes)())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch._C.DisableTorchFunction())  # pyright: ignore[reportPrivateUsage]
            stack.enter_context(torch.autocast(HOST.type, enabled=False))
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
            yield
    finally:
        torch.set_num_threads(threads)
        if collects:
            gc.enable()


def _norms_in(node: Node) -> float:
    """By how many layer norms' tapes its own counts: half of the price is the operation's, half its storages'."""
    return (1 + node.num_tape_storages / _STORAGES_OF_A_NORM) / 2


def _count(graph: Graph, schedule: Schedule, price: str) -> float:
    """How often a schedule pays a price."""
    free = dict.fromkeys(fields_in("seconds", Node), 0.0)
    graph = replace(graph, nodes=tuple(replace(node, **free) for node in graph.nodes))
    return simulate(_FREE._replace(**{price: 1.0}).put_on(graph), schedule).recompute_seconds


_FREE = RerunPrices(*(0.0 for _ in RerunPrices._fields))

_NOTHING = nn.Identity()
"""The module of a graph that was written down and captured nowhere."""


_PARAMETERS = ((_WIDTH,), (_WIDTH,), *[(_WIDTH, _WIDTH), (_WIDTH,)] * 5)
_MIDDLE = 3
"""How many projections there are, each of which a GELU reads."""

_NORM, _PROJECTION, _ACTIVATION = 0, 1, 1 + 2 * _MIDDLE
"""Their places among the operations of a block: a layer norm, the first of these projections, a sigmoid."""

_RESULTS = 4
"""How many of the last, one after the other, save what they return."""


def _transformer() -> fx.GraphModule:
    graph = fx.Graph()
    h, *weights = [graph.placeholder(f"v{k}") for k in range(1 + len(_PARAMETERS) * _BLOCKS)]
    for k in range(0, len(weights), len(_PARAMETERS)):
        scale, shift, *linears = weights[k : k + len(_PARAMETERS)]
        ups, downs = linears[: 2 * _MIDDLE], linears[2 * _MIDDLE :]
        inner = graph.call_function(nn.functional.layer_norm, (h, (_WIDTH,), scale, shift))
        for up in zip(ups[::2], ups[1::2], strict=True):
            inner = graph.call_function(nn.functional.linear, (inner, *up))
            inner = graph.call_function(nn.functional.gelu, (inner,))
        inner = graph.call_function(torch.sigmoid, (inner,))
        inner = graph.call_method("view", (inner, (_WIDTH, _WIDTH)))  # an output of which there are views needs hooks
        for down in zip(downs[::2], downs[1::2], strict=True):
            h = graph.call_function(operator.add, (h, graph.call_function(nn.functional.linear, (inner, *down))))
        for _ in range(_RESULTS):
            h = graph.call_function(torch.tanh, (h,))
    graph.output((h,))
    return fx.GraphModule({}, graph)


def _seconds(program: Program, values: list[Any]) -> float:
    start = time.thread_time()
    with torch.enable_grad():
        (out,) = run_forward(program, list(values))
        torch.autograd.grad(out.sum(), values)
    return time.thread_time() - start
