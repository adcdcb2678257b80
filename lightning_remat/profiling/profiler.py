"""Measures every operation of a traced module, forward and backward, one by one: a `Graph` of bytes and seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..capture.tracer import is_alike, recapture
from ..devices import HOST, device_of
from ..measure.allocated_growth import measure_allocated_growth
from ..measure.cost_model import CostCounter
from ..measure.meter import Peak, measure_growth
from ..measure.stopwatch import Stopwatch
from ..measure.tensor_bytes import logical_bytes, storage_bytes, tensor_kinds
from ..module_state.ambient import casts_apart
from ..module_state.nesting import tensors_in
from ..module_state.own_draws import OwnDraws
from ..operations.contexts import ContextStack, common_contexts
from ..operations.evaluation import Run, compile_constant, compile_operation, detached, effect_outputs, slots
from ..operations.module_hooks import silent
from ..operations.operation import TracedModule
from ..operations.saved_tensors import Leaf, OutputRef, TapeRef, classify, storage_key, storage_owners, tensors_of
from ..schedules.graph import Graph, Node
from .apart import apart
from .backward_costs import backward_costs
from .gradient_owners import GradientOwners
from .gradient_probe import GradientProbe, SavedStore, has_several_backwards, seconds_beside
from .layouts import Layouts, gradient_layouts


def profile(
    traced: TracedModule,
    *args: Any,
    repeats: int = 5,
    with_scratch: bool = False,
    with_kernels: bool = False,
    **kwargs: Any,
) -> Graph:
    """The traced operations with their costs on these inputs.

    Every operation runs alone, its backward right after its forward, so that no more memory is alive than a forward
    without gradients needs. Bytes are exact for what autograd keeps. Seconds are those of the fastest run on the device
    of the inputs, or estimates from operation counts on fake tensors. The runs of one operation lie passes over all
    operations apart, so that a moment in which the machine is busy elsewhere spoils one of them and not all.

    Args:
        traced: What `trace` returned; its module, buffers, gradients, random states and flags stay as they are.
        *args: Inputs of the sizes to profile.
        repeats: Timed passes over the operations; fewer where they take longer than ten seconds.
        with_scratch: Whether workspaces on the CPU include the memory that kernels use beside tensors.
        with_kernels: Whether they include the tensors that kernels allocate inside themselves, which only PyTorch's
            allocator sees. On devices they always do; on fake tensors nobody can tell.
        **kwargs: Keyword inputs.

    Returns:
        A graph with one node for each operation.

    Raises:
        ValueError: The inputs do not have the structure that was traced.
    """
    given = tensors_in((args, kwargs))
    called, values = recapture(traced, args, kwargs)
    if not is_alike(called, traced):
        raise ValueError(
            f"{type(traced.module).__name__} decides on inputs of these sizes or types otherwise than on those that it "
            "was traced with. Remedy: trace it with these"
        )
    return profile_call(called, values, given, repeats=repeats, with_scratch=with_scratch, with_kernels=with_kernels)


def profile_call(
    traced: TracedModule,
    values: list[Any],
    given: list[Tensor],
    *,
    repeats: int = 5,
    with_scratch: bool = False,
    with_kernels: bool = False,
) -> Graph:
    """What `profile` returns, of a call whose values are known.

    Args:
        traced: The operations.
        values: Of its placeholders.
        given: The tensors among the arguments of the call.
        repeats, with_scratch, with_kernels: See `profile`.
    """
    values, fake = [silent(v) for v in values], next((t for t in values if isinstance(t, FakeTensor)), None)
    with ExitStack() as stack:
        stack.enter_context(casts_apart())
        if fake is not None:
            stack.enter_context(fake.fake_mode)
        stack.enter_context(torch.enable_grad())
        layouts = gradient_layouts(traced, values)
        profiler = _Profiler(traced, values, layouts, is_fake=fake is not None, with_scratch=with_scratch)
        profiler.with_kernels = with_kernels and fake is None and profiler.device.type == "cpu" and not with_scratch
        if profiler.with_scratch:  # a first pass makes the kernels' code, which stays and is no workspace
            for n in range(len(traced.operations)):
                profiler.measure(n)
            profiler.start_over()
        nodes = [profiler.measure(n) for n in range(len(traced.operations))]
        nodes = profiler.owners.settled(nodes)
        if fake is None:
            nodes = profiler.timed(nodes, repeats)
    return Graph(
        nodes,
        input_bytes=storage_bytes(given),
        static_bytes=storage_bytes([*traced.module.parameters(), *traced.module.buffers()]),
        outputs=traced.outputs,
        profiled_on=tensor_kinds(given),
    )


class _Profiler:
    """Goes through the operations in order; holds the values that later ones still read."""

    def __init__(
        self, traced: TracedModule, values: list[Any], layouts: Layouts, *, is_fake: bool, with_scratch: bool
    ) -> None:
        self.traced, self.layouts = traced, layouts
        self.operations = traced.operations
        self.slot_of = slots(traced)
        self.run = [compile_operation(o, self.slot_of, is_first=True) for o in self.operations]
        self.constants = [(c, compile_constant(c, self.slot_of)) for c in traced.constants]
        self.given: dict[fx.Node, Any] = {
            n: apart(v, is_written=n in traced.written) for n, v in zip(traced.placeholders, values, strict=True)
        } | traced.fetched()
        self.start_over()
        self.draws = OwnDraws()
        # Elsewhere the mode would only cost the time that is measured; on fake tensors nothing is drawn.
        self.drawing = {n for n, operation in enumerate(self.operations) if operation.is_random and not is_fake}
        tensors = [v for v in self.given.values() if isinstance(v, Tensor)]
        self.device = device_of(tensors)
        self.metered_device = HOST if is_fake else self.device
        # A device's allocator counts workspaces anyway, and what it reserves for one operation says nothing of a step.
        self.with_scratch = with_scratch and not is_fake and self.device.type == "cpu"
        self.with_kernels = False
        self.external = {key for t in tensors if (key := storage_key(t)) is not None}
        self.leaves: list[list[Leaf]] = [[] for _ in self.operations]
        self.last_reader: dict[fx.Node, int] = {}
        for n, operation in enumerate(self.operations):
            self.last_reader |= dict.fromkeys((i for part in operation.parts for i in part.all_input_nodes), n)

    def start_over(self) -> None:
        """Back to the inputs, before the first operation."""
        self.values: dict[fx.Node, Any] = dict(self.given)
        self.constants_pending = list(self.constants)
        self.owners = GradientOwners.of(map(self._own_tensors, range(len(self.operations))))

    def _own_tensors(self, n: int) -> list[Tensor]:
        """Parameters and inputs of the region that operation n reads and that have gradients."""
        found = {id(v): v for i in self.operations[n].external if isinstance(v := self.given[i], Tensor)}
        return [t for t in found.values() if t.requires_grad]

    def measure(self, n: int) -> Node:
        """Runs operation n alone and tells what it costs."""
        operation = self.operations[n]
        self._note_constants()
        inputs: dict[fx.Node, Any] = {}
        counter = CostCounter(self.device)
        with self._growth() as growth, self._counted(counter):
            values, store = self._run(n, inputs)
        leaves = tensors_of(values)
        self.leaves[n] = [Leaf.of(t) for t in leaves]
        sources = classify(store.tensors, storage_owners(self.operations, self.leaves, n), self.external)
        read = self.external | {
            key for i in operation.inputs for leaf in self.leaves[i] if (key := leaf.key) is not None
        }
        tape = [t for t, source in zip(store.tensors, sources, strict=True) if isinstance(source, TapeRef)]
        made_bytes = storage_bytes(leaves, read)
        # Who keeps views of inputs beside other results keeps those inputs alive: counted, as if they were copies.
        output_bytes = made_bytes if operation.view_of is not None else storage_bytes(leaves, self.external)
        tape_bytes = storage_bytes(tape, read | {key for leaf in self.leaves[n] if (key := leaf.key) is not None})
        node = Node(
            name=operation.name,
            kind=operation.kind,
            inputs=operation.inputs,
            saved=tuple(sorted({s.operation for s in sources if isinstance(s, OutputRef)})),
            output_bytes=output_bytes,
            tape_bytes=tape_bytes,
            forward_workspace_bytes=max(0, growth.peak_bytes - made_bytes - tape_bytes) + self._scratch_bytes(n),
            storage_of=operation.view_of if not output_bytes else None,
            is_random=operation.is_random,
            mutates=tuple(self.traced.owned[n] for n in operation.writes),
            gradient_bytes=logical_bytes(t for t in leaves if t.requires_grad),
            shares_gradient=(),
            num_outputs=max(1, len(leaves)),
        )
        for part, value in zip(operation.outputs, values, strict=True):
            self.values[part] = detached(value)
        del leaves, tape
        backward_seconds = 0.0
        if node.gradient_bytes:
            node, backward_seconds = self._measure_backward(n, node, inputs, values, store)
        del values, store
        self._free(n)
        return replace(node, forward_seconds=counter.seconds, backward_seconds=backward_seconds)

    def _scratch_bytes(self, n: int) -> int:
        """A recomputation writes into copies of the buffers that the first run wrote."""
        return storage_bytes(self.given[i] for i in self.operations[n].writes)

    def _measure_backward(
        self, n: int, node: Node, inputs: dict[fx.Node, Any], values: list[Any], store: SavedStore
    ) -> tuple[Node, float]:
        """The node with the fields that its backward decides, and estimated seconds."""
        inner, own = self._targets(n, inputs)
        targets = [t for t, _ in inner] + own
        producers = [p for _, p in inner]
        has_several = has_several_backwards(tensors_of(values))
        probe = self._probe(n, values, targets)
        counter = CostCounter(self.device)
        with self._growth() as growth, self._counted(counter):
            probe.run()
        gradients = probe.gradients
        fresh = {
            p
            for p, gradient, passed in zip(producers, gradients, probe.passed_on, strict=False)
            if gradient is not None and not passed
        }
        contributions = logical_bytes(
            g for g, p in zip(gradients, producers, strict=False) if g is not None and p in fresh
        )
        here = [(t, g) for t, g in zip(own, gradients[len(inner) :], strict=True) if g is not None]
        for t, g in here:
            self.owners.note(n, t, logical_bytes([g]))
        parameter_bytes = storage_bytes(g for t, g in here if isinstance(t, nn.Parameter))
        input_bytes = storage_bytes(g for t, g in here if not isinstance(t, nn.Parameter))
        accounted = (node.gradient_bytes or 0) + contributions + parameter_bytes + input_bytes
        adding = [t for t in self.owners.added_to(n, own) if any(t is made for made, _ in here)]
        added_bytes = storage_bytes(g for t, g in here if any(t is a for a in adding))
        del probe, gradients, here
        again = partial(self._growth_again, n, inputs, targets)
        reads_own = bool(node.tape_bytes) or n in node.saved
        costs = partial(backward_costs, has_several=has_several, reads_own=reads_own)
        if adding:
            adds = partial(again, adding=adding)
            self.owners.note_costs(n, adding, costs(adds, adds(), accounted - added_bytes))
        node = replace(
            node,
            parameter_bytes=parameter_bytes,
            input_gradient_bytes=input_bytes,
            shares_gradient=tuple(p for p in dict.fromkeys(producers) if p not in fresh),
            **costs(again, growth.peak_bytes, accounted),
        )
        return node, counter.seconds

    def _growth_again(
        self,
        n: int,
        inputs: dict[fx.Node, Any],
        targets: list[Tensor],
        *,
        releases: bool = False,
        holds: bool = False,
        adding: Collection[Tensor] = (),
    ) -> int:
        """Growth of memory in the backward.

        Args:
            n: The operation.
            inputs: Its inputs.
            targets: What its backward makes gradients of.
            releases: Whether the output and the tape go when they have been read.
            holds: Whether the gradient of the output does not.
            adding: Targets whose gradients go as soon as they are made, added to what is there.
        """
        values, store = self._run(n, inputs)
        probe = self._probe(n, values, targets, holds=holds, adding=adding)
        if not releases:
            with self._growth() as growth:
                probe.run()
            return growth.peak_bytes
        read = {storage_key(t) for v in inputs.values() for t in tensors_of([v])} | self.external
        going = [t for t in store.tensors if storage_key(t) not in read]
        del values
        with self._growth(going) as growth:
            going.clear()
            store.hand_over()
            probe.run()
        return growth.peak_bytes

    def _probe(self, n: int, values: list[Any], targets: list[Tensor], **how: Any) -> GradientProbe:
        return GradientProbe(tensors_of(values), targets, strides=self.layouts.get(n, {}), **how)

    def _counted(self, counter: CostCounter) -> AbstractContextManager[object]:
        """Estimates seconds, where they are not measured later and the mode does not change what autograd does."""
        return nullcontext() if self.with_kernels else counter

    def _growth(self, include: Iterable[Tensor] = ()) -> AbstractContextManager[Peak]:
        if self.with_kernels:
            return measure_allocated_growth()
        return measure_growth(self.metered_device, include, with_scratch=self.with_scratch)

    def _targets(self, n: int, inputs: dict[fx.Node, Any]) -> tuple[list[tuple[Tensor, int]], list[Tensor]]:
        """Tensors with gradients: those that operations made, with their producer, and parameters and inputs."""
        inner = [
            (t, self.traced.producer[i])
            for i, value in inputs.items()
            if i in self.traced.producer
            for t in tensors_of([value])
            if t.requires_grad
        ]
        return inner, self._own_tensors(n)

    def _run(self, n: int, inputs: dict[fx.Node, Any], watch: Stopwatch | None = None) -> tuple[list[Any], SavedStore]:
        store, operation = SavedStore(), self.operations[n]
        for part in operation.parts:
            for i in part.all_input_nodes:
                if i in self.slot_of and i not in inputs and i not in operation.parts:
                    inputs[i] = self._input(i)
        values = {self.slot_of[i]: value for i, value in inputs.items()}
        draws = self.draws if n in self.drawing else nullcontext()
        with ContextStack() as contexts, torch.autograd.graph.saved_tensors_hooks(store.pack, store.unpack), draws:
            contexts.enter(common_contexts(operation.parts))
            with watch or nullcontext():
                made = self.run[n](values)
        for part, value in zip(effect_outputs(operation), made[len(operation.outputs) :], strict=True):
            self.values[part] = value
        return list(made[: len(operation.outputs)]), store

    def _input(self, node: fx.Node) -> Any:
        producer = self.traced.producer.get(node)
        if producer is None:
            return self.values[node]
        value = detached(self.values[node])
        index = 0
        for k, part in enumerate(self.operations[producer].outputs):
            if part is node:
                break
            index += len(tensors_of([self._value_shape(producer, k)]))
        for k, t in enumerate(tensors_of([value])):
            if self.leaves[producer][index + k].requires_grad:
                t.requires_grad_()
        return value

    def _value_shape(self, producer: int, k: int) -> Any:
        return self.values.get(self.operations[producer].outputs[k])

    def timed(self, nodes: tuple[Node, ...], repeats: int) -> tuple[Node, ...]:
        """The nodes with the least seconds that each took in some passes over all of them."""
        best, beside = [(math.inf, math.inf)] * len(nodes), seconds_beside(self.device)
        start = time.perf_counter()
        for k in range(repeats):
            if k and time.perf_counter() - start > _TIMING_SECONDS:
                break
            self.start_over()
            seconds = [self._time(n, beside) for n in range(len(nodes))]
            best = [(min(f, g), min(b, c)) for (f, b), (g, c) in zip(best, seconds, strict=True)]
        return tuple(replace(n, forward_seconds=f, backward_seconds=b) for n, (f, b) in zip(nodes, best, strict=True))

    def _time(self, n: int, beside: float) -> tuple[float, float]:
        """Seconds of one forward and one backward of operation n, less what any backward takes beside."""
        self._note_constants()
        inputs: dict[fx.Node, Any] = {}
        watch = Stopwatch(self.device)
        values, store = self._run(n, inputs, watch)
        forward_seconds, backward_seconds = watch.seconds, 0.0
        if any(t.requires_grad for t in tensors_of(values)):
            inner, own = self._targets(n, inputs)
            probe = self._probe(n, values, [t for t, _ in inner] + own)
            store.hand_over()
            with watch:
                probe.run()
            backward_seconds = max(0.0, watch.seconds - beside)
        for part, value in zip(self.operations[n].outputs, values, strict=True):
            self.values[part] = detached(value)
        self._free(n)
        return forward_seconds, backward_seconds

    def _note_constants(self) -> None:
        """Evaluates the shapes that have become known."""
        waiting: list[tuple[fx.Node, Run]] = []
        for constant, run in self.constants_pending:
            if all(i in self.values for i in constant.all_input_nodes):
                (self.values[constant],) = run({self.slot_of[i]: self.values[i] for i in constant.all_input_nodes})
            else:
                waiting.append((constant, run))
        self.constants_pending = waiting

    def _free(self, n: int) -> None:
        """Drops the values that nobody reads any more."""
        self._note_constants()
        pending = {i for constant, _ in self.constants_pending for i in constant.all_input_nodes}
        for node in [i for i in self.values if i in self.traced.producer]:
            if self.last_reader.get(node, -1) <= n and node not in pending:
                del self.values[node]


_TIMING_SECONDS = 10.0  # after which no further pass over the operations begins
