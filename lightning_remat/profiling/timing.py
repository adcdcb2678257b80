"""Seconds of operations: each alone, and backwards that follow one another as in a step."""

from __future__ import annotations

import math
import operator
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ..devices import HOST
from ..measure.stopwatch import Stopwatch
from ..operations.saved_tensors import tensors_of
from ..schedules.graph import Node
from .gradient_probe import GradientProbe
from .single_runs import SingleRuns

_TIMING_SECONDS = 10.0  # after which no further pass over the operations begins
TOGETHER_BYTES = 2**24
"""What the operations may hold whose backwards are timed together: little, where there is no memory to spare."""

SHORT_SECONDS = 1e-3
"""Of forward and backward of an operation, which the state of the caches changes."""


class Timing:
    """Passes over operations, of which the fastest runs count.

    Forwards and backwards have passes of their own: after one another they find the processor's caches cold. One alone
    finds them colder than in a step, too, which tells where kernels are short: those that follow one another are timed
    together as well, where they hold little memory, as in a second step after a first, and what each took alone is
    scaled to that. What autograd takes to record counts there, too: forwards without have passes of their own. What
    draws random numbers is asked at each call where from, which a step does not do: of its seconds that is taken off.

    Args:
        runs: Of the operations.
        nodes: Their bytes.
        device: Where they run.
        probe: Runs the backward of one, given its number, its outputs and the targets.
        together_bytes: What the operations may hold whose backwards are timed together.
    """

    def __init__(
        self,
        runs: SingleRuns,
        nodes: Sequence[Node],
        device: torch.device,
        probe: Callable[[int, list[Any], list[Tensor]], GradientProbe],
        together_bytes: int = TOGETHER_BYTES,
    ) -> None:
        self.runs, self.nodes, self.device, self.probe = runs, nodes, device, probe
        self.together_bytes = together_bytes
        self.changed: set[int] = set()  # operations that return what they changed in place
        self.num_calls = [0] * len(nodes)  # for which an operation waits until `runs.draws` has been asked
        self.asking: list[float] = []  # seconds that it takes to ask about one

    def timed(self, repeats: int) -> tuple[Node, ...]:
        """The nodes with their seconds.

        Args:
            repeats: How many passes; fewer where they take long.
        """
        count = len(self.nodes)
        forward, backward, unrecorded = ([math.inf] * count for _ in range(3))
        windows: list[range] = []
        forwards: dict[range, float] = {}
        backwards: dict[range, float] = {}
        beside: list[float] = []
        start = time.perf_counter()
        for k in range(repeats):
            if k and time.perf_counter() - start > _TIMING_SECONDS:
                break
            self.runs.start_over()
            forward = [min(known, self._forward(n)) for n, known in enumerate(forward)]
            self.runs.start_over()
            for n in range(count):
                seconds, empty = self._backward(n)
                backward[n] = min(backward[n], seconds)
                beside.append(empty)
            windows = windows or [*self._windows(map(operator.add, forward, backward))]
            if all(len(some) == 1 for some in windows):
                continue
            self.runs.start_over()
            for some in windows:
                backwards[some] = min(backwards.get(some, math.inf), self._together(some, forwards))
            self.runs.start_over()
            with torch.no_grad():
                unrecorded = [min(known, self._run(n)) for n, known in enumerate(unrecorded)]
        recording = [
            max(0.0, 1 - u / f) if 0 < f <= SHORT_SECONDS else 0.0 for f, u in zip(forward, unrecorded, strict=True)
        ]
        asking = statistics.median(self.asking) if self.asking else 0.0
        forward = [max(0.0, f - asking * calls) for f, calls in zip(forward, self.num_calls, strict=True)]
        nothing = statistics.median(beside) if beside else 0.0
        backward = [max(0.0, seconds - nothing) for seconds in backward]
        _scale(forward, forwards)
        _scale(backward, {some: max(0.0, seconds - nothing) for some, seconds in backwards.items()})
        return tuple(
            replace(node, forward_seconds=f, backward_seconds=b, recording_seconds=part * f)
            for node, f, b, part in zip(self.nodes, forward, backward, recording, strict=True)
        )

    def _forward(self, n: int) -> float:
        draws = self.runs.draws
        if n in self.runs.drawing:  # before it, when the caches are as cold as it will find them
            self.asking.append(self._seconds_of_asking())
        before = draws.num_calls
        seconds = self._run(n)
        calls = draws.num_calls - before
        # While a device runs what the first call asked for, the host asks about the next ones.
        self.num_calls[n] = calls if self.device == HOST else min(calls, 1)
        return seconds

    def _run(self, n: int) -> float:
        watch = Stopwatch(self.device)
        self.runs.keep(n, self.runs.run_timed(n, {}, watch))
        return watch.seconds

    def _seconds_of_asking(self) -> float:
        """By how much the host is slower at a call of which `runs.draws` is asked: at one that draws nothing."""
        draws, watch, x = self.runs.draws, Stopwatch(HOST), torch.zeros(2, 2, 2, device=HOST, requires_grad=True)
        with watch:
            torch.matmul(x, x)
        alone, before = watch.seconds, draws.num_calls
        with draws, watch:
            torch.matmul(x, x)
        return (watch.seconds - alone) / (draws.num_calls - before)

    def _backward(self, n: int) -> tuple[float, float]:
        """Seconds of a backward of operation n, and of one of nothing there."""
        inputs: dict[fx.Node, Any] = {}
        x = torch.zeros((), device=self.device, requires_grad=True)
        beside = self._seconds(_backward([x.view_as(x)], [x]))
        values = self.runs.run_timed(n, inputs, None)
        outputs = [t for t in tensors_of(values) if t.grad_fn is not None]
        targets = [t for t, _ in self.runs.made_tensors(inputs)] + self.runs.own_tensors(n)
        if len(self.runs.operations[n].parts) > 1 and any(t._version for t in outputs):
            # PyTorch refuses tensors that were changed in place, though no step may ask for this backward: by hooks.
            self.changed.add(n)
            values, store = self.runs.run(n, inputs)
            backward = self.probe(n, values, targets).run
            store.hand_over()
        else:
            backward = _backward(outputs, targets)
        seconds = self._seconds(backward) if outputs else 0.0
        self.runs.keep(n, values)
        return seconds, beside

    def _windows(self, seconds: Iterable[float]) -> Iterator[range]:
        """The operations, those in one range that are short and hold little together."""
        alone = self.changed.union(n for n, taken in enumerate(seconds) if taken > SHORT_SECONDS)
        start, held = 0, 0
        for n, node in enumerate(self.nodes):
            own = node.output_bytes + node.tape_bytes + node.parameter_bytes + node.input_gradient_bytes
            if n > start and (held + own > self.together_bytes or not alone.isdisjoint((n - 1, n))):
                yield range(start, n)
                start, held = n, 0
            held += own
        if self.nodes:
            yield range(start, len(self.nodes))

    def _together(self, some: range, forwards: dict[range, float]) -> float:
        """Seconds of the backward of operations that follow one another, in one step or a second; nothing of one alone.

        Args:
            some: The operations.
            forwards: Gets the seconds of the forwards of their pieces, where these are the least so far.
        """
        if len(some) == 1:
            self.runs.keep(some.start, self.runs.run_timed(some.start, {}, None))
            return 0.0
        inputs: dict[fx.Node, Any] = {}
        seconds = self._step(some, inputs, forwards)
        if not any(self.runs.operations[n].writes or self.runs.operations[n].effects for n in some):
            # Once more: what the passes do between operations leaves the caches colder than the step before does.
            seconds = min(seconds, self._step(some, self.runs.read_before(some, inputs), forwards))
        return seconds

    def _step(self, some: range, inputs: dict[fx.Node, Any], forwards: dict[range, float]) -> float:
        """One forward and backward of operations that follow one another; seconds of the backward.

        Args:
            some: The operations.
            inputs: Gets the values that they read and make.
            forwards: See `_together`.
        """
        outputs: list[Tensor] = []
        watch = Stopwatch(self.device)
        for piece in self.runs.pieces(some):
            if len(piece) == 1:
                made = [self.runs.run_timed(piece.start, inputs, None)]
            else:
                made = self.runs.run_together(piece, inputs, watch)
                forwards[piece] = min(forwards.get(piece, math.inf), watch.seconds)
            for n, values in zip(piece, made, strict=True):
                self.runs.keep(n, values)
                for part, value in zip(self.runs.operations[n].outputs, values, strict=True):
                    inputs[part] = value
                    if self.runs.is_read_after(part, some.stop - 1):
                        outputs += [t for t in tensors_of([value]) if t.grad_fn is not None]
        if not outputs:
            return 0.0
        targets = {id(t): t for t, n in self.runs.made_tensors(inputs) if n not in some}
        targets |= {id(t): t for n in some for t in self.runs.own_tensors(n)}
        return self._seconds(_backward(outputs, [*targets.values()]))

    def _seconds(self, run: Callable[[], object]) -> float:
        watch = Stopwatch(self.device)
        with watch:
            run()
        return watch.seconds


def _scale(seconds: list[float], together: dict[range, float]) -> None:
    """What operations took alone becomes their part of what they took together."""
    for some, taken in together.items():
        if len(some) > 1 and (alone := sum(seconds[n] for n in some)):
            seconds[some.start : some.stop] = [taken / alone * seconds[n] for n in some]


def _backward(outputs: list[Tensor], targets: list[Tensor]) -> Callable[[], object]:
    """What runs the backward of some outputs, each with a gradient of its own."""
    gradients = [torch.ones_like(t) for t in outputs]
    return partial(torch.autograd.grad, outputs, targets, gradients, allow_unused=True)
