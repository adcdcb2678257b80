"""Runs the operations of a traced module one by one, each on inputs that end its own graph of gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..capture.unseen_writes import UNSEEN_WRITES
from ..measure.stopwatch import Stopwatch
from ..module_state.batches import record_histories
from ..module_state.own_draws import OwnDraws
from ..operations.contexts import ContextStack, common_contexts
from ..operations.evaluation import (
    Item,
    Run,
    Stretch,
    compile_constant,
    compile_operation,
    compile_stretch,
    effect_outputs,
    slots,
)
from ..operations.leaves import copy_of, detached
from ..operations.operation import Operation, TracedModule
from ..operations.saved_tensors import Leaf, storage_keys, tensors_of
from ..operations.synchronized import shares_statistics
from .gradient_probe import SavedStore


class SingleRuns:
    """Goes through the operations in order; holds the values that later ones still read.

    Args:
        traced: The operations.
        values: Of its placeholders.
        is_fake: Whether these are fake: nothing is drawn then.

    Attributes:
        draws: Where operations draw from. It is asked about each of their calls, which takes time.
        drawing: The operations that run so.
        external: Storages of what comes in from outside, and of what is shared.
        shared: What processes share, which is kept until the step ends.
        leaves: Of each operation that has run, what its tensors are.
    """

    def __init__(self, traced: TracedModule, values: list[Any], *, is_fake: bool) -> None:
        self.traced, self.operations = traced, traced.operations
        self._slot_of = slots(traced)
        self._runs = [compile_operation(o, self._slot_of, is_first=True) for o in self.operations]
        self._constants = [(c, compile_constant(c, self._slot_of)) for c in traced.constants]
        self._stretches: dict[range, Stretch] = {}
        self.given: dict[fx.Node, Any] = {
            n: _apart(v, is_written=n in traced.written) for n, v in zip(traced.placeholders, values, strict=True)
        } | traced.fetched()
        self.draws = OwnDraws()
        self._cut = record_histories(self.given_tensors())
        # Elsewhere the mode would only cost the time that is measured.
        self.drawing = {n for n, operation in enumerate(self.operations) if operation.is_random and not is_fake}
        self.shared: dict[fx.Node, Tensor] = {}
        self._note_external()
        self.leaves: list[list[Leaf]] = [[] for _ in self.operations]
        self._last_reader: dict[fx.Node, int] = {}
        for n, operation in enumerate(self.operations):
            self._last_reader |= dict.fromkeys((i for part in operation.parts for i in part.all_input_nodes), n)
        self.start_over()

    def start_over(self) -> None:
        """Back to the inputs, before the first operation."""
        self._cut()
        self._asked: dict[tuple[int, fx.Node], bool] = {}
        self._values: dict[fx.Node, Any] = dict(self.given)
        self._pending = list(self._constants)
        self._note_constants()

    def given_tensors(self) -> list[Tensor]:
        """What comes in from outside."""
        return [v for v in self.given.values() if isinstance(v, Tensor)]

    def run(self, n: int, inputs: dict[fx.Node, Any]) -> tuple[list[Any], SavedStore]:
        """The outputs of operation n and what autograd saved; the values that it read are added to `inputs`."""
        store = SavedStore()
        with torch.autograd.graph.saved_tensors_hooks(store.pack, store.unpack):
            return self.run_timed(n, inputs, None), store

    def run_timed(self, n: int, inputs: dict[fx.Node, Any], watch: Stopwatch | None) -> list[Any]:
        """The outputs of operation n alone; what autograd saves it keeps by itself."""
        operation = self.operations[n]
        self._read(n, inputs)
        values = {self._slot_of[i]: value for i, value in inputs.items()}
        with ContextStack() as contexts, self.draws if n in self.drawing else nullcontext():
            contexts.enter(common_contexts(operation.parts))
            with watch or nullcontext():
                made = self._runs[n](values)
        for part, value in zip(effect_outputs(operation), made[len(operation.outputs) :], strict=True):
            self._values[part] = value
            if shares_statistics(part):
                self.shared[part] = value
        if _moves_storages(operation):
            self._note_external()
        return list(made[: len(operation.outputs)])

    def pieces(self, some: range) -> Iterator[range]:
        """Operations that follow one another, in ranges that one function can run.

        Apart is what draws random numbers, and what has effects that are noted as soon as it has run.
        """
        start = some.start
        for n in some:
            operation = self.operations[n]
            if n in self.drawing or effect_outputs(operation) or _moves_storages(operation):
                yield from (piece for piece in (range(start, n), range(n, n + 1)) if piece)
                start = n + 1
        if start < some.stop:
            yield range(start, some.stop)

    def run_together(self, piece: range, inputs: dict[fx.Node, Any], watch: Stopwatch) -> list[list[Any]]:
        """The outputs of the operations of a piece, run by one function as in a step; the rest as of `run_timed`."""
        if piece not in self._stretches:
            self._stretches[piece] = compile_stretch(self._items(piece), self._slot_of, is_first=True)
        for n in piece:
            self._read(n, inputs)
        values: list[Any] = [None] * len(self._slot_of)
        for i, value in inputs.items():
            values[self._slot_of[i]] = value
        with watch:
            self._stretches[piece](values, {})
        return [[values[self._slot_of[part]] for part in self.operations[n].outputs] for n in piece]

    def _items(self, piece: range) -> Iterator[Item]:
        """Its operations, each followed by the shapes that are known then."""
        known = {*self._values}
        for n in piece:
            yield self.operations[n]
            known.update(self.operations[n].outputs)
            for constant, _ in self._pending:
                if constant not in known and known.issuperset(constant.all_input_nodes):
                    known.add(constant)
                    yield constant

    def _read(self, n: int, inputs: dict[fx.Node, Any]) -> None:
        """Adds the values that operation n reads and that are known: others the same piece makes."""
        parts = self.operations[n].parts
        for i in self.operations[n].writes:
            self._cut_written(n, i, inputs)
        for part in parts:
            for i in part.all_input_nodes:
                if i in self._values and i not in inputs and i not in parts:
                    inputs[i] = self._input(i)

    def _cut_written(self, n: int, node: fx.Node, inputs: dict[fx.Node, Any]) -> None:
        """Cuts what operation n writes from an earlier run of it; it asks for gradients as before the first."""
        value: Tensor = self._values[node]
        asks = self._asked.setdefault((n, node), value.requires_grad)
        if value.requires_grad:
            self._values[node] = inputs[node] = copy_of(value) if asks else value.detach()
            self.external |= storage_keys([self._values[node]])

    def keep(self, n: int, values: list[Any]) -> None:
        """Operation n has run, with these outputs: what nobody reads any more goes."""
        for part, value in zip(self.operations[n].outputs, values, strict=True):
            self._values[part] = detached(value)
        self._note_constants()
        pending = {i for constant, _ in self._pending for i in constant.all_input_nodes}
        for node in [i for i in self._values if i in self.traced.producer]:
            if self._last_reader.get(node, -1) <= n and node not in pending:
                del self._values[node]

    def read_before(self, some: range, inputs: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
        """Of the values that operations have read, those that none of them made."""
        return {i: value for i, value in inputs.items() if self.traced.producer.get(i, -1) not in some}

    def is_read_after(self, node: fx.Node, n: int) -> bool:
        """Whether what follows operation n reads a value, as what is returned is read."""
        return self._last_reader.get(node, -1) > n or self.traced.output_node in node.users

    def own_tensors(self, n: int) -> list[Tensor]:
        """Parameters and inputs of the region that operation n reads and that have gradients."""
        found = {id(v): v for i in self.operations[n].external if isinstance(v := self.given[i], Tensor)}
        return [t for t in found.values() if t.requires_grad]

    def made_tensors(self, inputs: dict[fx.Node, Any]) -> list[tuple[Tensor, int]]:
        """Tensors with gradients that other operations made, among the inputs of one, with their producers."""
        return [
            (t, self.traced.producer[i])
            for i, value in inputs.items()
            if i in self.traced.producer
            for t in tensors_of([value])
            if t.requires_grad
        ]

    def _input(self, node: fx.Node) -> Any:
        producer = self.traced.producer.get(node)
        if producer is None:
            return self._values[node]
        value = detached(self._values[node])
        index = 0
        for part in self.operations[producer].outputs:
            if part is node:
                break
            index += len(tensors_of([self._values.get(part)]))
        for k, t in enumerate(tensors_of([value])):
            if self.leaves[producer][index + k].requires_grad:
                t.requires_grad_()
        return value

    def _note_external(self) -> None:
        self.external = storage_keys([*self.given_tensors(), *self.shared.values()])

    def _note_constants(self) -> None:
        """Evaluates the shapes that have become known."""
        waiting: list[tuple[fx.Node, Run]] = []
        for constant, run in self._pending:
            if all(i in self._values for i in constant.all_input_nodes):
                (self._values[constant],) = run({self._slot_of[i]: self._values[i] for i in constant.all_input_nodes})
            else:
                waiting.append((constant, run))
        self._pending = waiting


def _moves_storages(operation: Operation) -> bool:
    """Whether what comes in from outside may lie elsewhere once it has run."""
    return any(shares_statistics(part) or part.target in UNSEEN_WRITES for part in operation.effects)


def _apart(value: Any, *, is_written: bool) -> Any:
    """A value of the call, on which a run is unknown to the module and its hooks.

    What is written is a copy, what has hooks or a history a twin in its memory.
    """
    if not isinstance(value, Tensor):
        return value
    has_hooks = getattr(value, "_backward_hooks", None) or getattr(value, "_post_accumulate_grad_hooks", None)
    if not is_written and not has_hooks and value.is_leaf:
        return value
    twin = value.detach().clone() if is_written else value.detach()
    if isinstance(value, nn.Parameter):
        return nn.Parameter(twin, value.requires_grad)
    return twin.requires_grad_(value.requires_grad)
