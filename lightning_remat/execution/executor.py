"""Runs a traced module by its program, inside autograd: one `Step` from a forward to its backward.

The first forward runs with gradients under saved-tensor hooks, so that the autograd graph is the ordinary one, but
holds references in place of tensors. What the schedule keeps lies in the step's own table. When a backward asks for
a saved tensor, the step advances to that backward, recomputing and discarding on the way.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from ..capture.tracer import Operation
from ..module_state.ambient import Ambient, recomputing
from ..module_state.plain_tensors import tensor_attributes
from ..module_state.random_state import generators_in_use
from ..operations.conditions import Conditions, modified
from ..operations.evaluation import call, detached, evaluate
from ..operations.saved_tensors import (
    ExternalRef,
    Leaf,
    OutputRef,
    Source,
    TapeRef,
    caught_tensors,
    classify,
    held_only_here,
    rebuilt,
    storage_key,
    storage_owners,
    tensor_in,
    tensors_of,
)
from ..schedules.schedule import Action
from .program import Program
from .watch import Watch


class Slot(NamedTuple):
    """What autograd holds in place of a saved tensor; the step does not hold it back, so that both die at once."""

    step: Step
    operation: int
    number: int


def run_forward(program: Program, module: nn.Module, tensors: list[Tensor], watch: Watch | None = None) -> Any:
    """The module's outputs, their autograd graph tied to a new step of the program.

    Args:
        program: What to follow.
        module: The module that was traced, or a copy of it.
        tensors: The tensors among the flattened arguments of the call.
        watch: Is told of every run.
    """
    if watch is None:
        return Step(program, module, tensors).forward()
    watch.enters()
    result = Step(program, module, tensors, watch).forward()
    watch.leaves()
    return result


class Step:
    """The state of one forward and its backward: what is resident, and how far the program has run."""

    def __init__(self, program: Program, module: nn.Module, tensors: list[Tensor], watch: Watch | None = None) -> None:
        count = len(program.traced.operations)
        self.program, self.module, self.watch = program, module, watch
        self.operations = program.traced.operations
        placeholders = [n for n in program.traced.fx_graph.nodes if n.op == "placeholder"]
        self.values: dict[fx.Node, Any] = dict(zip(placeholders, tensors, strict=True))
        self.versions = {n: t._version for n, t in self.values.items()}
        self.devices = list({t.device for t in tensors if t.device.type not in ("cpu", "meta")})
        self.ambient = Ambient.current(sorted({"cpu", *(d.type for d in self.devices)}))
        self.is_fake = any(isinstance(t, FakeTensor) for t in tensors)
        owned = [*module.parameters(), *module.buffers(), *(t for _, t in tensor_attributes(module)), *tensors]
        self.external = {key for t in owned if (key := storage_key(t)) is not None}
        self.outputs: list[list[Any] | None] = [None] * count
        self.leaves: list[list[Leaf]] = [[] for _ in range(count)]
        self.tapes: list[dict[int, Tensor] | None] = [None] * count
        self.sources: list[list[Source]] = [[] for _ in range(count)]  # of the tensors that autograd saved
        self.read: set[tuple[int, int]] = set()  # saved tensors (operation, number) that this backward has read
        self.released: dict[tuple[int, int], weakref.ref[torch.UntypedStorage]] = {}  # storages let go of since
        self.conditions: list[Conditions | None] = [None] * count
        self.running: tuple[int, list[Tensor]] | None = None  # the first run in progress and what it has saved
        self.dormant: dict[int, list[Any]] = {}  # emptied outputs that a later run in the forward fills again
        self.output_versions: dict[int, list[int]] = {}
        self.position = -1  # in program.backwards; len(backwards) after a failure, so that it starts over
        self.lock = threading.RLock()

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(self) -> Any:
        """Runs the program up to the first backward."""
        returned: dict[fx.Node, Any] = {}
        try:
            self._note_constants(-1)
            for kind, n in self.program.forward:
                if kind == "F" and not self.leaves[n] and self.outputs[n] is None and n not in self.dormant:
                    self._run_first(n, returned)
                elif kind == "F":
                    self._revive(n)
                elif kind == "D" and self.program.revived:
                    self._empty(n)
                else:
                    self._discard(kind, n)
            # From here on the table must not hold the autograd graph that holds the table.
            self.outputs = [None if values is None else [detached(v) for v in values] for values in self.outputs]
            self.dormant.clear()
        except BaseException:
            self._forget()
            raise
        self.output_versions = {
            n: [t._version for t in tensors_of(self.outputs[n] or [])] for n in self.program.traced.outputs
        }
        result = next(n for n in self.program.traced.fx_graph.nodes if n.op == "output").args[0]
        leaves: Any = fx.map_arg(result, lambda n: returned[n] if n in returned else self.values[n])
        return self.program.traced.output_spec.build(leaves)

    def _run_first(self, n: int, returned: dict[fx.Node, Any]) -> None:
        operation = self.operations[n]
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Slot:
            saved.append(tensor)
            return Slot(self, n, len(saved) - 1)

        with generators_in_use if operation.is_random else nullcontext():
            conditions = self.conditions[n] = Conditions(
                self.module, operation, self.devices, self.program.written, is_fake=self.is_fake
            )
            self.running = n, saved
            if self.watch is not None:
                self.watch.begins(self, n)
            with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
                values = evaluate(self.module, operation, self._fetch_connected, is_first=True)
            self.running = None
            conditions.end()
        if self.watch is not None:
            self.watch.ended(self, n, [values, saved])
        if self.program.revived:
            values = self._apart_from_inputs(operation, values)
        self.outputs[n] = values
        leaves = tensors_of(values)
        self.leaves[n] = [Leaf.of(t) for t in leaves]
        sources = classify(saved, storage_owners(self.operations, self.leaves, n), self.external)
        tape = {k: saved[k].detach() for k, source in enumerate(sources) if isinstance(source, TapeRef)}
        saved.clear()  # autograd holds the pack hook, and it this list
        self.sources[n] = sources
        self.tapes[n] = tape or None
        if not sources and self.program.before[self.program.place[n]]:
            self._announce(n, leaves)
        pairs = zip(operation.outputs, values, strict=True)
        returned.update((node, value) for node, value in pairs if any(user.op == "output" for user in node.users))
        self._note_constants(n)

    def _apart_from_inputs(self, operation: Operation, values: list[Any]) -> list[Any]:
        """The values as tensors of their own where the operation returned its input, which may be put to sleep."""
        inputs = {id(t) for i in operation.inputs for t in tensors_of(self.outputs[i] or [])}
        return tree_map_only(Tensor, lambda t: t.view_as(t) if id(t) in inputs else t, values)

    def _announce(self, n: int, leaves: list[Tensor]) -> None:
        """A backward that reads nothing still moves the program on.

        One that autograd does not know of, as of taking an item of a tuple, is part of the one before it.
        """
        before = [t.grad_fn for i in self.operations[n].inputs for t in tensors_of(self.outputs[i] or [])]
        for leaf in leaves:
            if leaf.grad_fn is not None and not any(leaf.grad_fn is node for node in before):
                leaf.grad_fn.register_prehook(partial(_arrive_before, weakref.ref(self), n))

    def _note_constants(self, n: int) -> None:
        for constant in self.program.constants_after.get(n, ()):
            self.values[constant] = call(self.module, constant, self._fetch_connected, is_first=True)

    def _fetch_connected(self, node: fx.Node) -> Any:
        producer = self.program.traced.producer.get(node)
        if producer is None:
            return self.values[node]
        values = self.outputs[producer]
        assert values is not None, f"{node} is not resident"
        return values[self.operations[producer].outputs.index(node)]

    def _empty(self, n: int) -> None:
        """Discards an output where the forward computes some again: those tensors sleep, to be filled again.

        All give up their memory. A view that sleeps holds its base, whether that is computed again or not.
        """
        values = self.outputs[n]
        assert values is not None
        if n not in self.program.traced.outputs:  # the caller holds what leaves the region
            for t in held_only_here(values):  # a hook or a custom function may keep one, as in the plain run
                t.data = t.data.new_empty(0)
        if n in self.program.revived:
            self.dormant[n] = values
        self.outputs[n] = None

    def _revive(self, n: int) -> None:
        """Recomputes within the forward; later operations read the first run's tensors, filled again."""
        values = self.dormant.pop(n, None)
        if values is not None and n in self.program.traced.outputs:
            self.outputs[n] = values
        self._rerun(n)
        if values is not None and n not in self.program.traced.outputs:
            again = tensors_of(self.outputs[n] or [])
            with torch.no_grad():
                for t, new in zip(tensors_of(values), again, strict=True):
                    t.data = new
            self.outputs[n] = values
            self.leaves[n] = [Leaf.of(t) for t in tensors_of(values)]

    # -- backward ---------------------------------------------------------------------------------------------------

    def unpack(self, n: int, number: int) -> Tensor:
        """Saved tensor `number` of operation `n`, for which its backward asks."""
        if self.running is not None:
            return self._saved_meanwhile(n, number)
        with self.lock:
            self.arrive(n)
            source = self.sources[n][number]
            if isinstance(source, ExternalRef):
                if source.tensor._version != source.version:
                    raise modified(f"a tensor of shape {tuple(source.tensor.shape)}", source.version, source.tensor)
                return source.tensor
            if isinstance(source, OutputRef) and (reference := self.released.get((n, number))) is not None:
                storage = reference()
                if storage is not None:  # read again by the same backward, while it lives
                    leaf = self.leaves[source.operation][source.leaf]
                    return tensor_in(storage, leaf.dtype, source.geometry or leaf.geometry)
            tensor = self._read(n, source)
            self._release(n, number, source, tensor)
            return tensor

    def _saved_meanwhile(self, n: int, number: int) -> Tensor:
        """A saved tensor for which code asks that differentiates within its forward."""
        assert self.running is not None
        running, saved = self.running
        if n == running:
            return saved[number]
        raise RuntimeError(
            f"{self.operations[running].name} differentiates through {self.operations[n].name} within the forward, "
            "where nothing can be recomputed. Remedy: leave it out of the rewritten modules"
        )

    def _read(self, n: int, source: OutputRef | TapeRef) -> Tensor:
        if isinstance(source, TapeRef):
            tape = self.tapes[n]
            if tape is None or source.index not in tape:
                self.tapes[n] = None
                self._rerun(n)
                tape = self.tapes[n]
                assert tape is not None
            return tape[source.index]
        if self.outputs[source.operation] is None:
            self._rerun(source.operation)
        leaf = tensors_of(self.outputs[source.operation] or [])[source.leaf]
        self._check_version(source.operation, source.leaf, leaf)
        return rebuilt(leaf, source.geometry)

    def _release(self, n: int, number: int, source: OutputRef | TapeRef, tensor: Tensor) -> None:
        """After the last read of a value by a backward it lives only as long as this backward."""
        self.read.add((n, number))
        released = self.program.released[n]
        if isinstance(source, TapeRef):
            tape = self.tapes[n]
            if ("T", n) in released and tape is not None:
                del tape[source.index]
        elif ("D", source.operation) in released:
            self.released[n, number] = weakref.ref(tensor.untyped_storage())
            if all(
                (n, k) in self.read
                for k, other in enumerate(self.sources[n])
                if isinstance(other, OutputRef) and other.operation == source.operation
            ):
                self.outputs[source.operation] = None

    def arrive(self, n: int) -> None:
        """Runs the program up to the backward of `n`; starts it over if that has passed (a second backward)."""
        with self.lock:
            target = self.program.place[n]
            if target == self.position:
                return
            try:
                if target < self.position:
                    self._start_over()
                while self.position < target:
                    self.position += 1
                    for action in self.program.before[self.position]:
                        self._act(action)
            except BaseException:
                self._forget()
                self.position = len(self.program.backwards)  # whatever comes next starts over
                raise

    def _start_over(self) -> None:
        self._forget()
        self.position = -1
        for action in self.program.forward:
            self._act(action)

    def _act(self, action: Action) -> None:
        kind, n = action
        if kind == "F":
            self._rerun(n)
        else:
            self._discard(kind, n)

    def _discard(self, kind: str, n: int) -> None:
        if kind == "D":
            self.outputs[n] = None
        else:
            self.tapes[n] = None

    def _rerun(self, n: int) -> None:
        """Recomputes an operation from detached inputs; its saved tensors are caught slot by slot."""
        operation = self.operations[n]
        saved: list[Tensor] = []
        conditions = self.conditions[n]
        assert conditions is not None
        inputs: dict[fx.Node, Any] = {}

        def fetch(node: fx.Node) -> Any:
            if node not in inputs:
                inputs[node] = self._fetch_detached(node)
            return inputs[node]

        with torch.enable_grad(), recomputing(), self.ambient.restored():
            for part in operation.parts:  # may recompute in its turn, under other conditions
                for i in part.all_input_nodes:
                    if i.op != "get_attr" and i not in operation.parts:
                        fetch(i)
            with conditions.restored(self.module), caught_tensors(saved):
                values = evaluate(self.module, operation, fetch, is_first=False)
        if self.watch is not None:
            self.watch.ended(self, n, [values, saved])
        if len(saved) != len(self.sources[n]):
            raise RuntimeError(
                f"{operation.name} saved {len(self.sources[n])} tensors for backward in its first run and {len(saved)} "
                "in its recomputation, so it does not do the same twice. Remedy: leave it out of the rewritten modules"
            )
        if self.tapes[n] is None:
            sources = enumerate(self.sources[n])
            self.tapes[n] = {k: saved[k].detach() for k, source in sources if isinstance(source, TapeRef)} or None
        saved.clear()  # it holds the graph that holds the hook that holds it
        if self.outputs[n] is None:
            self.outputs[n] = [detached(v) for v in values]
            self.output_versions.pop(n, None)

    def _fetch_detached(self, node: fx.Node) -> Any:
        producer = self.program.traced.producer.get(node)
        if producer is None:
            value = self.values[node]
            if isinstance(value, Tensor):
                if value._version != self.versions.get(node, value._version):
                    raise modified(f"input {node.name}", self.versions[node], value)
                return value.detach().requires_grad_(value.requires_grad)
            return value
        if self.outputs[producer] is None:
            self._rerun(producer)
        values = self.outputs[producer]
        assert values is not None
        copies = [detached(v) for v in values]
        for k, t in enumerate(tensors_of(copies)):
            self._check_version(producer, k, t)
            if self.leaves[producer][k].requires_grad:
                t.requires_grad_()
        return copies[self.operations[producer].outputs.index(node)]

    def _check_version(self, n: int, leaf: int, tensor: Tensor) -> None:
        versions = self.output_versions.get(n)
        if versions and versions[leaf] != tensor._version:
            raise modified(f"the output of {self.operations[n].name}", versions[leaf], tensor)

    def _forget(self) -> None:
        count = len(self.operations)
        self.output_versions.clear()
        self.read.clear()
        self.released.clear()
        self.outputs, self.tapes = [None] * count, [None] * count
        self.dormant.clear()


def _arrive_before(reference: weakref.ref[Step], n: int, _gradients: Any) -> None:
    step = reference()
    if step is not None:  # else no backward of it reads anything any more
        step.arrive(n)


def _unpack(slot: Slot) -> Tensor:
    return slot.step.unpack(slot.operation, slot.number)
