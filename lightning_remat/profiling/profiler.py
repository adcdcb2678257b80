"""Measures every operation of a traced module, forward and backward, one by one: a `Graph` of bytes and seconds."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..capture.tracer import is_alike, recapture
from ..devices import HOST, device_of, most_refilled_bytes
from ..errors import TraceError, check_kind
from ..measure.allocated_growth import Peak, can_listen
from ..measure.cost_model import CostCounter
from ..measure.meter import measure_growth
from ..measure.tensor_bytes import logical_bytes, storage_bytes, tensor_kinds
from ..module_state.ambient import casts_apart, outside_inference
from ..module_state.batches import tensors_held
from ..operations.functions import may_keep_what_it_reads
from ..operations.module_hooks import silent
from ..operations.operation import TracedModule
from ..operations.routes import is_recorded_alike
from ..operations.saved_tensors import (
    Leaf,
    OutputRef,
    Source,
    TapeRef,
    classify,
    held_tensors,
    storage_key,
    storage_keys,
    storage_owners,
    tensors_of,
)
from ..operations.synchronized import alone
from ..schedules.graph import Graph, Node
from .backward_costs import backward_costs
from .gradient_owners import GradientOwners
from .gradient_probe import GradientProbe, has_several_backwards
from .layouts import Layouts, gradient_layouts
from .single_runs import SingleRuns
from .timing import TOGETHER_BYTES, Timing

logger = logging.getLogger(__name__)


def profile(
    traced: TracedModule,
    *args: Any,
    repeats: int = 5,
    with_scratch: bool = False,
    with_kernels: bool = True,
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
            allocator sees, and tells where no other profiler runs. On devices they always do; on fake tensors nobody
            can tell.
        **kwargs: Keyword inputs.

    Returns:
        A graph with one node for each operation.

    Raises:
        TraceError: The module cannot be called with these inputs, or is no single graph then.
        TypeError: Something else is given than what `trace` returned, as the module itself.
        ValueError: The inputs do not have the structure that was traced.
    """
    check_kind(traced, TracedModule, "what trace returns of a module and its inputs")
    options = {"repeats": repeats, "with_scratch": with_scratch, "with_kernels": with_kernels}
    try:
        with outside_inference():
            return profile_arguments(traced, args, kwargs, **options)
    except TraceError as error:
        raise TraceError(
            f"{type(traced.module).__name__} was traced with other inputs, or has changed since. Remedy: profile it "
            f"with inputs like those, or trace it anew. Of these it is true that {error}",
            where=error.where,
        ) from error


def profile_arguments(traced: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Graph:
    """What `profile` returns, where inputs may have the names of its options, which are those of `profile_call`."""
    given = tensors_held((args, kwargs))
    called, values = recapture(traced, args, kwargs)
    if not is_alike(called, traced):
        raise ValueError(
            f"{type(traced.module).__name__} decides on inputs of these sizes or types otherwise than on those that it "
            "was traced with. Remedy: trace it with these"
        )
    return profile_call(called, values, given, **options)


def profile_call(
    traced: TracedModule,
    values: list[Any],
    given: list[Tensor],
    *,
    repeats: int = 5,
    with_scratch: bool = False,
    with_kernels: bool = True,
    together_bytes: int = TOGETHER_BYTES,
) -> Graph:
    """What `profile` returns, of a call whose values are known.

    Args:
        traced: The operations.
        values: Of its placeholders.
        given: The tensors among the arguments of the call.
        repeats: See `profile`, as for the others.
        with_scratch: Whether workspaces include what kernels use beside tensors.
        with_kernels: Whether they include what kernels allocate inside themselves.
        together_bytes: What operations may hold whose backwards are timed together: none where memory is short.
    """
    values, fake = [silent(v) for v in values], next((t for t in values if isinstance(t, FakeTensor)), None)
    with ExitStack() as stack:
        stack.enter_context(casts_apart())
        stack.enter_context(alone())
        if fake is not None:
            stack.enter_context(fake.fake_mode)
        stack.enter_context(torch.enable_grad())
        runs = SingleRuns(traced, values, is_fake=fake is not None)
        device = device_of(runs.given_tensors())
        # A device's allocator counts workspaces anyway, and what it reserves for one operation says nothing of a step.
        is_on_host = fake is None and device.type == "cpu"
        with_scratch &= is_on_host
        with_kernels &= is_on_host and not with_scratch
        if with_kernels and not can_listen():
            logger.info("a profiler is running: what kernels allocate inside themselves is not counted beside it")
            with_kernels = False
        layouts = gradient_layouts(traced, values, with_gaps=with_kernels)  # which kernels close
        counts = {"with_scratch": with_scratch, "with_kernels": with_kernels}
        profiler = _Profiler(traced, runs, layouts, device, counts, is_fake=fake is not None)
        if with_scratch:  # a first pass makes the kernels' code, which stays and is no workspace
            for n in range(len(traced.operations)):
                profiler.measure(n)
            profiler.start_over()
        nodes = [profiler.measure(n) for n in range(len(traced.operations))]
        nodes = profiler.owners.settled(profiler.held_by_autograd_alone(nodes))
        if fake is None:
            nodes = Timing(runs, nodes, device, profiler.probe, together_bytes).timed(repeats)
    return Graph(
        nodes,
        input_bytes=storage_bytes([*given, *runs.shared.values()]),
        static_bytes=storage_bytes([*traced.module.parameters(), *traced.module.buffers()]),
        outputs=traced.outputs,
        profiled_on=tensor_kinds(given),
    )


class _Profiler:
    """Goes through the operations in order and tells what each costs."""

    def __init__(
        self,
        traced: TracedModule,
        runs: SingleRuns,
        layouts: Layouts,
        device: torch.device,
        counts: dict[str, bool],
        *,
        is_fake: bool,
    ) -> None:
        self.traced, self.runs, self.layouts, self.counts = traced, runs, layouts, counts
        self.operations = traced.operations
        self.device, self.metered_device, self.is_fake = device, HOST if is_fake else device, is_fake
        self.start_over()

    def start_over(self) -> None:
        """Back to the inputs, before the first operation."""
        self.runs.start_over()
        self.owners = GradientOwners.of(map(self.runs.own_tensors, range(len(self.operations))))

    def measure(self, n: int) -> Node:
        """Runs operation n alone and tells what it costs."""
        operation = self.operations[n]
        inputs: dict[fx.Node, Any] = {}
        counter = CostCounter(self.device)
        with self._growth() as growth, self._counted(counter):
            values, store = self.runs.run(n, inputs)
        if operation.is_dead_end:
            store.tensors.clear()  # gone as soon as it has run
        leaves = tensors_of(values)
        self.runs.leaves[n] = [Leaf.of(t) for t in leaves]
        sources = classify(store.tensors, storage_owners(self.operations, self.runs.leaves, n), self.runs.external)
        read = self.runs.external | {
            key for i in operation.inputs for leaf in self.runs.leaves[i] if (key := leaf.key) is not None
        }
        tape = [t for t, source in zip(store.tensors, sources, strict=True) if isinstance(source, TapeRef)]
        made_bytes = storage_bytes(leaves, read)
        # Who keeps views of inputs beside other results keeps those inputs alive: counted, as if they were copies.
        output_bytes = made_bytes if operation.view_of is not None else storage_bytes(leaves, self.runs.external)
        others = read | {key for leaf in self.runs.leaves[n] if (key := leaf.key) is not None}
        tape_bytes = storage_bytes(tape, others)
        held, is_tape_held = self._held(n, inputs, sources, tape)
        node = Node(
            name=operation.name,
            kind=operation.kind,
            inputs=operation.inputs,
            saved=tuple(sorted({s.operation for s in sources if isinstance(s, OutputRef)})),
            held=held,
            is_tape_held=is_tape_held,
            output_bytes=output_bytes,
            tape_bytes=tape_bytes,
            forward_workspace_bytes=max(0, growth.peak_bytes - made_bytes - tape_bytes) + self._scratch_bytes(n),
            storage_of=operation.view_of if not output_bytes else None,
            is_random=operation.is_random,
            mutates=tuple(self.traced.owned.get(n, n.name) for n in operation.writes),
            gradient_bytes=0 if operation.is_dead_end else logical_bytes(t for t in leaves if t.requires_grad),
            shares_gradient=(),
            num_outputs=max(1, len(leaves)),
            num_saved=len(store.tensors),
            num_tape_storages=len(storage_keys(tape) - others),
        )
        del leaves, tape
        backward_seconds = 0.0
        if node.gradient_bytes:
            node, backward_seconds = self._measure_backward(n, node, inputs, values)
        self.runs.keep(n, values)
        return replace(node, forward_seconds=counter.seconds, backward_seconds=backward_seconds)

    def _held(
        self, n: int, inputs: dict[fx.Node, Any], sources: list[Source], tape: list[Tensor]
    ) -> tuple[tuple[int, ...], bool]:
        """The operations of whose saved outputs autograd holds the tensors that were read, and no others.

        Its own is one of them, of which autograd holds the storage, if that is soon filled again. And whether its tape
        can be reached where autograd holds it, and is soon filled again.
        """
        saved = {source.operation for source in sources if isinstance(source, OutputRef)}
        can_be_reached = _is_soon_filled(tape) and is_recorded_alike(self.operations[n])
        if not (saved or can_be_reached):
            return (), False
        made = tensors_of(self.runs.run_timed(n, inputs, None))
        held = held_tensors(made)
        if held is None or len(held) != len(sources):
            return (), False
        elsewhere = self.runs.external | storage_keys((*made, *tensors_of(inputs.values())))
        is_tape_held = can_be_reached and 0 < storage_bytes(tape) == storage_bytes(held, elsewhere)
        read = {id(t) for i, value in inputs.items() if i in self.traced.producer for t in tensors_of([value])}
        owners = storage_owners(self.operations, self.runs.leaves, n)
        others = {
            owner[0] for t in held if id(t) not in read and (owner := owners.get(storage_key(t) or 0)) is not None
        }
        if len(made) > 1 or not _is_soon_filled(made):
            others.add(n)
        return tuple(sorted(saved - others)), is_tape_held

    def held_by_autograd_alone(self, nodes: list[Node]) -> list[Node]:
        """The nodes, without what a caller, a view or a function's context may hold, too, in their `held`."""
        roots = list(range(len(nodes)))
        for n, node in enumerate(nodes):
            roots[n] = n if node.storage_of is None else roots[node.storage_of]
        elsewhere = {roots[n] for n in self.traced.outputs}
        for operation in self.operations:
            if any(map(may_keep_what_it_reads, operation.parts)):
                elsewhere.update(roots[i] for i in operation.inputs)
        viewed = {root for n, root in enumerate(roots) if n != root}  # views are read when their base is done
        return [
            replace(node, held=tuple(i for i in node.held if i not in elsewhere and (i != n or n not in viewed)))
            for n, node in enumerate(nodes)
        ]

    def _scratch_bytes(self, n: int) -> int:
        """A recomputation writes into copies of the buffers that the first run wrote."""
        return storage_bytes(self.runs.given[i] for i in self.operations[n].writes)

    def _measure_backward(
        self, n: int, node: Node, inputs: dict[fx.Node, Any], values: list[Any]
    ) -> tuple[Node, float]:
        """The node with the fields that its backward decides, and estimated seconds."""
        inner, own = self.runs.made_tensors(inputs), self.runs.own_tensors(n)
        targets = [t for t, _ in inner] + own
        producers = [p for _, p in inner]
        has_several = has_several_backwards(tensors_of(values))
        probe = self.probe(n, values, targets, leaves=own)
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
        alone = growth.peak_bytes + probe.part_bytes
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
            **costs(again, alone, accounted),
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
        values, store = self.runs.run(n, inputs)
        leaves = self.runs.own_tensors(n)
        probe = self.probe(n, values, targets, holds=holds, leaves=leaves, adding=adding)
        if not releases:
            with self._growth() as growth:
                probe.run()
            return growth.peak_bytes + probe.part_bytes
        read = {storage_key(t) for v in inputs.values() for t in tensors_of([v])} | self.runs.external
        going = [t for t in store.tensors if storage_key(t) not in read]
        # An output that the backward does not read ends when the schedule says so, not here.
        staying = [t for t in tensors_of(values) if all(storage_key(t) != storage_key(g) for g in going)]
        del values
        with self._growth(going) as growth:
            going.clear()
            store.hand_over()
            probe.run()
        del staying
        return growth.peak_bytes + probe.part_bytes

    def probe(self, n: int, values: list[Any], targets: list[Tensor], **how: Any) -> GradientProbe:
        """The backward of operation n, to be run."""
        return GradientProbe(tensors_of(values), targets, strides=self.layouts.get(n, {}), **how)

    def _counted(self, counter: CostCounter) -> AbstractContextManager[object]:
        """Estimates seconds on fake tensors; on real ones they are measured later."""
        return counter if self.is_fake else nullcontext()

    def _growth(self, include: Iterable[Tensor] = ()) -> AbstractContextManager[Peak]:
        return measure_growth(self.metered_device, include, **self.counts)


def _is_soon_filled(tensors: Sequence[Tensor]) -> bool:
    """Whether the memory of these, if it was given up, is soon there again with what it held."""
    return bool(tensors) and storage_bytes(tensors) <= most_refilled_bytes(tensors[0].device)
