"""Runs a traced module by its program up to the first backward.

It runs with gradients, so that the autograd graph is the ordinary one. An operation whose saved tensors all stay until
its backward runs as it is; of the others autograd gets references.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx.node import map_aggregate
from torch.utils.weak import WeakIdKeyDictionary

from ..module_state.random_state import Draws, Source, drawn_from
from ..operations.contexts import ContextStack
from ..operations.leaves import copy_of, differentiable_in, leaf_of
from ..operations.saved_tensors import (
    ExternalRef,
    OutputRef,
    geometry_of,
    likeness_of,
    storage_key,
    storage_keys,
    tensors_of,
)
from .assembly import with_rests
from .executor import Execution, Watch
from .instructions import Do
from .learning import Learning
from .modified import copies_of
from .places import Place, Reference, is_part, is_same
from .program import Program, SlotOf
from .telling import Keeper

_OUTSIDE = Place(ExternalRef())
_BACKWARD = -1  # holds a tensor in place of an operation


def run_forward(program: Program, values: list[Any], watch: Watch | None = None) -> Any:
    """What the captured graph returns, its autograd graph tied to a new execution of the program.

    Args:
        program: What to follow.
        values: Of the graph's placeholders: parameters, buffers, inputs, numbers.
        watch: Is told of every run.
    """
    program = program.variants[-1] if program.variants else program
    return _Forward(Execution(program, values, watch)).run()


class _Packing:
    """Makes references of what autograd saves, which holds this, and nothing that holds the graph through it.

    Attributes:
        operation: Which one runs.
        references: Of what it has saved.
    """

    def __init__(self) -> None:
        self.operation = -1
        self.references: list[Reference] = []

    def pack(self, tensor: Tensor) -> Reference:
        """The reference in place of the tensor."""
        references = self.references
        reference = Reference(self.operation, len(references), tensor, tensor._version)
        references.append(reference)
        return reference


class _Forward:
    """What only the forward of an execution needs."""

    def __init__(self, execution: Execution) -> None:
        self.execution, self.program, self.values = execution, execution.program, execution.values
        is_known = len(self.program.learned) == len(self.program.hooked)
        self.packing, self.keeper = _Packing(), Keeper(execution)
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.packing.pack, execution.unpack)
        self.draws: Draws | None = None  # of the operation that runs, during which the generators are locked
        self.generators: list[Source] | None = None
        self.learns = None if is_known else Learning(self.program, self.values, execution.num_given)
        self.returned: dict[int, Any] = {}
        self.copied = copies_of(self.program, self.values)
        self.dormant: dict[int, list[Any]] = {}  # emptied outputs that a later run fills again
        self.outside: set[int | None] = set()
        self.awake: dict[Tensor, set[int]] = {}  # tensor -> the operations that returned it and do not sleep
        if self.program.revived:
            self.outside = {storage_key(t) for t in tensors_of(self.values)}
            self.awake = cast("dict[Tensor, set[int]]", WeakIdKeyDictionary())

    def run(self) -> Any:
        """Runs the program up to the first backward; what the captured graph returns."""
        learns, returned, values, program = self.learns, self.returned, self.values, self.program
        is_special = bool(program.revived or self.copied)
        is_watched = is_special or learns is not None or self.execution.watch is not None
        try:
            with ContextStack() as contexts:
                for part in program.forward if is_watched else program.stretches:
                    if callable(part):
                        contexts.enter(())
                        part(values, self.execution.tapes, self)
                        continue
                    what, n = part
                    if what is Do.RUN:
                        self._run_first(n, contexts)
                    elif what is Do.DROP:
                        self.execution.drop(n)
                    elif what is Do.COMPUTE:
                        run, slot = program.constants[n]
                        (values[slot],) = run(values)
                    elif what is Do.DROP_TAPE:
                        self.execution.tapes.pop(n, None)
                    elif what is Do.REST_TAPE:
                        program.rests.tapes[n].rest(values, values[program.steps[n].outputs[0]])
                    elif what is Do.SLEEP:
                        self._sleep(n)
                    elif what is Do.REST:
                        (slot,) = program.steps[n].outputs
                        program.rests.tensors[n].rest(values, values[slot])
                        self.execution.drop(n)
                    else:
                        self._revive(n)
                        if learns is not None:
                            learns.note(n)
            if learns is not None and learns.is_first:
                rests = learns.rests(returned)
                program.variants.append(with_rests(program, rests) if rests.operations else program)
            self._settle()
            self._leave_autograd()
            if program.rests:
                self._watch_sources()
            if program.rests.unproven:
                self._prove_rests()
        except BaseException:
            self._stop()
            self.execution.forget()
            raise

        def returns(a: Any) -> Any:
            return returned.get(a.slot, self.values[a.slot]) if isinstance(a, SlotOf) else a

        return map_aggregate(self.program.result, returns)

    def _settle(self) -> None:
        """What the forward has written is what recomputations must find."""
        for slot in self.program.settled:
            self.execution.versions[slot] = self.values[slot]._version

    def _leave_autograd(self) -> None:
        """From here on the table must not hold the autograd graph that holds the table."""
        values, program = self.values, self.program
        for n in program.left:
            for slot in program.steps[n].outputs:
                if (value := values[slot]) is not None:
                    values[slot] = leaf_of(value)
                    if n in program.rests.tensors:
                        program.rests.tensors[n].rest(values, value)
        for slot in program.seen:
            if values[slot] is not None:
                self.execution.output_versions[slot] = self.execution.versions_of(slot)
        self.dormant.clear()

    def _watch_sources(self) -> None:
        nodes: set[Any] = set()
        for entry in self.program.rests.sources:
            value = self.returned.get(entry.slot, self.values[entry.slot])
            tensor = value if isinstance(value, Tensor) else tensors_of([value])[entry.leaf]
            nodes.add(entry.node_of(tensor))
        self.keeper.watch(nodes - {None})

    def _prove_rests(self) -> None:
        """Where something else holds memory that was given up, nothing rests in further calls."""
        unproven = self.program.rests.unproven
        known = storage_keys(tensors_of(self.values))
        if any(tensor.is_held(known) for tensor in unproven):
            self.program.use_hooks()
        unproven.clear()

    def _run_first(self, n: int, contexts: ContextStack) -> None:
        execution, values, learns = self.execution, self.values, self.learns
        step = self.program.steps[n]
        copied = {slot for slot in self.copied.get(n, ()) if isinstance(values[slot], Tensor)}
        for slot in copied.union(step.kept if step.is_repeated else ()):
            execution.copies.setdefault(n, {})[slot] = copy_of(values[slot])
        if not step.is_repeated:
            for slot in step.kept:
                execution.kept_versions[n, slot] = values[slot]._version
        contexts.enter(step.contexts)
        if learns is not None:
            learns.begin()
        self.begin(n)
        made = step.run(values)
        outputs = made[: len(step.outputs)]
        if self.program.revived:
            self._wake(n, outputs)
            if step.may_keep:
                self._wake(_BACKWARD, (values[slot] for slot in step.inputs))
        for slot, value in zip(step.outputs, outputs, strict=True):
            values[slot] = value
            if step.is_output:
                self.returned[slot] = value
        for slot, value in zip(step.effects, made[len(step.outputs) :], strict=True):
            values[slot] = value
        if learns is not None:
            learns.note(n)
        self.end(n)
        if self.execution.watch is not None:
            self.execution.watch.ended(step.operation.name, list(outputs), is_first=True)

    def begin(self, n: int) -> None:
        """What operation n saves and draws is noted from here on."""
        execution, step = self.execution, self.program.steps[n]
        self.packing.operation = n
        if step.is_recorded_again and n not in execution.differentiable:
            # Before it runs: what it writes in place may need gradients afterwards.
            found = (tensor for slot in step.inputs for tensor in differentiable_in(slot, self.values[slot]))
            execution.differentiable[n] = tuple(found)
        if step.operation.is_random:
            self.draw(n)
        if step.is_hooked:
            execution.running = n
            self.hooks.__enter__()

    def draw(self, n: int) -> None:
        """What operation n draws is noted from here on."""
        if self.generators is None:
            kinds = self.execution.kinds
            self.generators = [] if kinds.is_fake else drawn_from(kinds.devices)
        self.draws = self.execution.draws[n] = Draws(self.generators)

    def drawn(self) -> None:
        """It has drawn."""
        draws, self.draws = self.draws, None
        if draws is not None:
            draws.end()

    def end(self, n: int) -> None:
        """Operation n has run; its inputs and outputs are in the table."""
        references, step = self._stop(), self.program.steps[n]
        if step.is_hooked:
            self._place(n, references)
        if step.is_announced and not references:
            self._announce(n, tensors_of(self.values[slot] for slot in step.outputs))

    def _stop(self) -> list[Reference]:
        """Nothing more is noted; the references that autograd got."""
        packing, execution = self.packing, self.execution
        if execution.running is not None:
            self.hooks.__exit__(None, None, None)
            execution.running = None
        self.drawn()
        references, packing.references = packing.references, []
        return references

    def _place(self, n: int, references: list[Reference]) -> None:
        """Notes where the tensors belong that autograd saved of operation n, and keeps those of its own.

        The references let go of what the schedule governs, and of the graph that holds them.
        """
        execution, values = self.execution, self.values
        places = self.program.learned.get(n)
        if places is None or len(places.every) != len(references):
            learns = self.learns or Learning(self.program, values, execution.num_given)
            places = learns.places(n, [r.held for r in references])
            if self.learns is not None:
                self.program.learned[n] = places
        every, changed = places.every, None
        for k, slot, part in places.whole:
            reference = references[k]
            if is_same(values[slot] if part < 0 else values[slot][part], reference.held):
                reference.held = None
            else:
                changed = self._changed(reference, changed or every)
        for k in places.parts:
            reference = references[k]
            if is_part(values[every[k].slot], reference.held, every[k]):
                reference.held = None
            else:
                changed = self._changed(reference, changed or every)
        execution.saved[n] = changed or every
        if places.own and self.program.steps[n].is_taped:
            self._tape(n, references, places.own)
            made = places.made
        else:
            made = *places.own, *places.made
        for k in made:
            if (tensor := references[k].held).requires_grad:
                references[k].held = tensor.detach()

    def _tape(self, n: int, references: list[Reference], own: Iterable[int]) -> None:
        """Puts the tape of an operation into the execution's keeping, unless it is to be discarded at once."""
        self.execution.taped[n] = [(k, likeness_of(references[k].held)) for k in own]
        if self.program.steps[n].keeps_tape:
            tape = self.execution.tapes[n] = dict[int, Tensor]()
            for k in own:
                tensor = references[k].held
                tape[k] = tensor.detach() if tensor.requires_grad else tensor  # it may be the very output
        for k in own:
            references[k].held = None
        if self.learns is not None:
            self.learns.tape_has_gone(n)

    def _changed(self, reference: Reference, places: tuple[Place, ...]) -> tuple[Place, ...]:
        """The places, if a saved tensor belongs elsewhere this time, or has other sizes: of a smaller batch, say."""
        k, tensor = reference.number, reference.held
        place, source = places[k], cast(OutputRef, places[k].source)
        if storage_key(tensors_of([self.values[place.slot]])[place.leaf]) != storage_key(tensor):
            reference.held = tensor.detach()  # it is another one this time: held, whatever it costs
            return *places[:k], _OUTSIDE, *places[k + 1 :]
        reference.held = None
        geometry = None if tensor.layout is not torch.strided else geometry_of(tensor)
        owner = tensors_of(self.values[slot] for slot in self.program.steps[source.operation].outputs)
        if source.leaf < len(owner) and geometry == geometry_of(owner[source.leaf]):
            geometry = None
        source = OutputRef(source.operation, source.leaf, geometry)
        moved = replace(place, source=source, is_whole=geometry is None)
        return *places[:k], moved, *places[k + 1 :]

    def _wake(self, n: int, outputs: Iterable[Any]) -> None:
        """Notes that operation n returned the outputs; several may return one tensor, as casts that change nothing do.

        Views in their place would be other nodes to autograd, which then adds gradients up in another order.
        """
        for t in tensors_of(outputs):
            self.awake.setdefault(t, set()).add(n)

    def _announce(self, n: int, leaves: list[Tensor]) -> None:
        """A backward that reads nothing still moves the program on.

        One that autograd does not know of, as of taking an item of a tuple, is part of the one before it.
        """
        step = self.program.steps[n]
        is_part = step.operation.view_of is not None
        before = [t.grad_fn for t in tensors_of(self.values[i] for i in step.inputs)] if is_part else []
        # One tensor for each node, which runs all of their hooks whichever of them get gradients.
        own = {node: t for t in leaves if (node := t.grad_fn) is not None and node not in before}
        self.keeper.hear_of(n, own.values(), is_output=step.is_output)

    def _sleep(self, n: int) -> None:
        """Discards an output where the forward computes some again: those tensors sleep, to be filled again.

        All give up their memory. A view that sleeps holds its base, whether that is computed again or not. A view of an
        input has no memory to give up, and what saved it, which is no reader to the schedule, has the very tensor.
        """
        step = self.program.steps[n]
        outputs = [self.values[slot] for slot in step.outputs]
        if not step.is_output:  # the caller holds what leaves the region
            for t in tensors_of(outputs):
                awake = self.awake.setdefault(t, set())
                awake.discard(n)
                if not awake and storage_key(t) not in self.outside:
                    t.data = t.data.new_empty(0)
        if n in self.program.revived:
            self.dormant[n] = outputs
        self.execution.drop(n)

    def _revive(self, n: int) -> None:
        """Recomputes within the forward; later operations read the first run's tensors, filled again."""
        step = self.program.steps[n]
        asleep = self.dormant.pop(n, None)
        self._settle()
        self.execution.run_again(n)
        if asleep is None:
            return
        if not step.is_output:
            again = tensors_of(self.values[slot] for slot in step.outputs)
            with torch.no_grad():
                for t, new in zip(tensors_of(asleep), again, strict=True):
                    if not self.awake.get(t):
                        t.data = new.detach()
            self._wake(n, asleep)
        for slot, value in zip(step.outputs, asleep, strict=True):
            self.values[slot] = value
