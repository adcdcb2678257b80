"""The state of one call of a traced module, from its forward to its backward, and what its backward does with it.

Of the operations of which something is discarded, autograd holds references in place of saved tensors. What the
schedule keeps lies in the execution's own table, and when a backward asks for a saved tensor, the program advances to
that backward, recomputing and discarding on the way.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ..capture.never_captured import never_captured
from ..module_state.ambient import Ambient, Recomputing, set_grad_enabled
from ..module_state.random_state import Draws
from ..operations.contexts import ContextStack
from ..operations.leaves import copy_of, leaf_of
from ..operations.saved_tensors import (
    Geometry,
    Likeness,
    OutputRef,
    TapeRef,
    geometry_of,
    rebuilt,
    tensor_in,
    tensors_of,
    version_of,
)
from .attended import Attended
from .instructions import Do
from .modified import clear_up, modified, note_change
from .places import TAPE, Place, Reference
from .program import Kinds, Program, Step
from .stretches import Again, LetGo, Part

_count_of = attrgetter("_version")
_NONE: dict[int, Tensor] = {}


class Watch(Protocol):
    """Is told of every run of an operation, for a self-check."""

    def ended(self, name: str, made: list[Any], *, is_first: bool) -> None:
        """A run of an operation has made these outputs."""


class Execution:
    """What is resident of one call, and how far its program has run.

    Args:
        program: What to follow.
        values: Of the graph's placeholders: parameters, buffers, inputs, numbers.
        watch: Is told of every run.
    """

    def __init__(self, program: Program, values: list[Any], watch: Watch | None = None) -> None:
        self.program, self.watch, self.steps, self.place = program, watch, program.steps, program.place
        self.num_given = len(values)
        self.values: list[Any] = [*values, *[None] * (program.num_slots - len(values))]
        for slot, value in program.fetched:
            self.values[slot] = value
        self.versions: list[int | None]
        try:
            self.versions = [*map(_count_of, values)]
        except (AttributeError, RuntimeError):  # there are numbers among them, or tensors made in inference mode
            self.versions = [version_of(v) if isinstance(v, Tensor) else None for v in values]
        if not program.kinds:
            program.kinds.append(Kinds.of(values))
        self.kinds = program.kinds[0]
        self.ambient = Ambient.current(self.kinds.types)
        self.saved: dict[int, Sequence[Place]] = {}  # of the hooked operations, in autograd's order
        self.taped: dict[int, list[tuple[int, Likeness]]] = {}  # those of them that nothing else holds
        self.differentiable = program.differentiable
        self.tapes: dict[int, dict[int, Tensor]] = {}
        self.draws: dict[int, Draws] = {}
        self.copies: dict[int, dict[int, Tensor]] = {}
        self.kept_versions: dict[tuple[int, int], int] = {}
        self.read: set[tuple[int, int]] = set()  # saved tensors that this backward has read
        self.released: dict[tuple[int, int], tuple[weakref.ref[torch.UntypedStorage], torch.dtype, Geometry]] = {}
        self.running: int | None = None  # the operation that runs for the first time and has its tensors saved
        self.output_versions: dict[int, list[int | None]] = {}
        self.task, self.is_same = -1, False  # of the backward in progress, and whether its settings are the forward's
        self.keeper: weakref.ref[Any] | None = None  # by which backwards find this, while something rests
        self.position = -1  # in program.backwards; len(backwards) after a failure, so that it starts over
        self.num_done = 0  # of program.busy
        self.lock = threading.RLock()

    @never_captured
    def unpack(self, reference: Reference) -> Tensor:
        """The tensor for which the backward of an operation asks.

        What is in the table is right whoever put it there, so that only what changes the table needs the lock.
        """
        n, number = reference.operation, reference.number
        if self.running is not None:
            return self._saved_meanwhile(reference, self.running)
        if self.place[n] != self.position:
            self.arrive(n)
        if (tensor := reference.held) is not None:
            if tensor._version != reference.version:
                raise modified(f"a tensor of shape {tuple(tensor.shape)}", reference.version, tensor)
            return tensor
        place = self.saved[n][number]
        owner = place.owner
        if owner >= 0:
            if owner not in self.output_versions and (value := self.values[owner]) is not None:
                if place.is_alone:
                    self.values[owner] = None
                elif place.is_last:
                    self._let_go(n, number, place)
                tensor = value if place.part < 0 else value[place.part]
                return tensor if place.is_whole else rebuilt(tensor, cast(OutputRef, place.source).geometry)
        elif owner == TAPE and (tensor := self.tapes.get(n, _NONE).pop(number, None)) is not None:
            return tensor
        with self.lock:
            self.arrive(n)
            return self._governed(n, number, place)

    def _let_go(self, n: int, number: int, place: Place) -> None:
        """After the last read of a value by a backward it lives only as long as this backward."""
        if place.fellows:
            self.read.add((n, number))
            if not self.read.issuperset((n, fellow) for fellow in place.fellows):
                return
        self.drop(cast(OutputRef, place.source).operation)

    def _governed(self, n: int, number: int, place: Place) -> Tensor:
        """A saved tensor that the schedule governs, read by the backward of `n`."""
        if self.released and (gone := self.released.get((n, number))) is not None:
            storage, dtype, geometry = gone[0](), *gone[1:]
            if storage is not None:  # read again by the same backward, while it lives
                return tensor_in(storage, dtype, geometry)
        source = place.source
        if isinstance(source, OutputRef):
            tensor = self._output(source)
            if place.is_last:
                self._let_go(n, number, place)
        else:
            assert isinstance(source, TapeRef)
            tensor = self._own(n, number)
            del self.tapes[n][number]
        if self.steps[n].may_keep:
            self._note_released(n, number, tensor)
        return tensor

    def _saved_meanwhile(self, reference: Reference, running: int) -> Tensor:
        """A saved tensor for which code asks that differentiates within its forward."""
        if reference.operation == running and reference.held is not None:
            return reference.held
        names = [self.name_of(n) for n in (running, reference.operation)]
        raise RuntimeError(
            f"{names[0]} differentiates through {names[1]} within the forward, where nothing can be recomputed. "
            "Remedy: leave it out of the rewritten modules"
        )

    def _own(self, n: int, number: int) -> Tensor:
        """A tensor of an operation's tape."""
        if number not in self.tapes.get(n, ()):
            self.tapes.pop(n, None)  # in which others may still be
            with self._recomputing():
                self.run_again(n, with_tape=True)
        return self.tapes[n][number]

    def _output(self, source: OutputRef) -> Tensor:
        """A tensor in the storage of an operation's output."""
        outputs = self.steps[source.operation].outputs
        if self.values[outputs[0]] is None:
            with self._recomputing():
                self.run_again(source.operation)
        leaf = self.values[outputs[0]]
        if len(outputs) > 1 or not isinstance(leaf, Tensor):
            leaf = tensors_of(self.values[slot] for slot in outputs)[source.leaf]
        if self.output_versions:
            self._check_output(source.operation)
        return leaf if source.geometry is None else rebuilt(leaf, source.geometry)

    def _note_released(self, n: int, number: int, tensor: Tensor) -> None:
        if tensor.layout is torch.strided:
            self.released[n, number] = weakref.ref(tensor.untyped_storage()), tensor.dtype, geometry_of(tensor)

    def arrive(self, n: int) -> None:
        """Runs the program up to the backward of `n`; starts it over if that has passed (a second backward)."""
        with self.lock:
            target, program = self.place[n], self.program
            if target == self.position:
                return
            try:
                is_same = self._is_ambient_same()
                if target < self.position:
                    self._start_over()
                while (place := program.busy[self.num_done]) <= target:
                    self.position = place
                    self.num_done += 1
                    if program.recomputes[place] or not is_same:
                        with Recomputing(None if is_same else self.ambient):  # once for all that runs here
                            self._follow(program.before[place])
                    else:
                        self._follow(program.before[place])
                self.position = target
                if self.keeper is not None and target >= program.rests.last_fill:
                    if (keeper := self.keeper()) is not None:
                        keeper.execution = None
                    self.keeper = None
            except BaseException:
                self._give_up()
                raise

    def fill(self) -> None:
        """Makes again all that rests."""
        with self.lock:
            try:
                with self._recomputing():
                    for n in self.program.rests.filled:
                        if self.values[self.steps[n].outputs[0]] is None:
                            self.run_again(n)
                        self._fill(n)
                    for n, tape in self.program.rests.tapes.items():
                        if self.values[tape.place] is not None:
                            self.run_again(n)
            except BaseException:
                self._give_up()
                raise

    def _fill(self, n: int) -> None:
        slot = self.steps[n].outputs[0]
        for tensor in self.program.rests.filled[n]:
            self.values[slot] = tensor.fill(self.values, self.values[slot])

    def _give_up(self) -> None:
        """Whatever comes next starts over."""
        self.forget()
        self.position = len(self.program.backwards)

    def _start_over(self) -> None:
        self.forget()
        self.position, self.num_done = -1, 0
        with self._recomputing():
            for what, n in self.program.forward:
                if what is Do.RUN or what is Do.RUN_AGAIN:
                    self.run_again(n, with_tape=self.steps[n].is_hooked)
                elif what in (Do.DROP, Do.SLEEP, Do.REST):
                    self.drop(n)
                elif what is Do.DROP_TAPE:
                    self.tapes.pop(n, None)

    def _follow(self, parts: tuple[Part, ...]) -> None:
        """Recomputes and discards."""
        for part in parts:
            if isinstance(part, LetGo):
                for slot in part.slots:
                    self.values[slot] = None
                for n in part.tapes:
                    self.tapes.pop(n, None)
            elif isinstance(part, tuple):
                what, n = part
                if what is Do.RUN_AGAIN:
                    self.run_again(n, with_tape=self.steps[n].is_hooked)
                elif what is Do.DROP:
                    self.drop(n)
                elif what is Do.FILL:
                    self._fill(n)
                else:
                    self.tapes.pop(n, None)
            elif self._is_as_before(part):
                self._run(part)
            else:
                self._follow(part.instructions)

    def _run(self, stretch: Again) -> None:
        if self.program.suspected:
            for n in self.copies.keys() & {n for _, n in stretch.instructions}:
                clear_up(self, n)
        set_grad_enabled(False)
        try:
            if stretch.attended:
                with Attended(self) as attendant:
                    stretch.run(self.values, self.tapes, attendant)
            else:
                stretch.run(self.values, self.tapes)
        finally:
            set_grad_enabled(True)

    def _is_as_before(self, stretch: Again) -> bool:
        """Whether a stretch needs nothing but its calls: all that it reads is there, and nothing of it has changed."""
        values, versions = self.values, self.versions
        for slot in stretch.reads:
            if values[slot] is None:
                return False
        for slot in stretch.external:
            if (version := versions[slot]) is not None and values[slot]._version != version:
                return False
        for slot in stretch.seen:
            if (known := self.output_versions.get(slot)) is not None and known != self.versions_of(slot):
                return False
        for n in stretch.hooked:
            if n in self.taped and n not in self.tapes:
                return False
        return self.watch is None

    def _is_ambient_same(self) -> bool:
        """Whether the forward's settings hold. It is asked once in each backward, in which nobody else runs."""
        task = torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]
        if task == -1 or task != self.task:
            self.task, self.is_same = task, self.ambient.is_current()
            if task != -1 and torch._C._autograd._get_current_graph_task_keep_graph():  # pyright: ignore
                self.program.use_hooks()  # what rests stays, when it has been filled
        return self.is_same

    def _recomputing(self) -> Recomputing:
        """The settings of the forward, with gradients."""
        return Recomputing(None if self._is_ambient_same() else self.ambient)

    def name_of(self, n: int) -> str:
        """Of an operation, for messages."""
        return self.steps[n].operation.name

    def drop(self, n: int) -> None:
        """The table lets go of an output."""
        for slot in self.steps[n].outputs:
            self.values[slot] = None

    def run_again(self, n: int, *, with_tape: bool = False) -> None:
        """Recomputes an operation, its inputs cut off from the graph; its tape is caught tensor by tensor."""
        step = self.steps[n]
        copies = self.copies.get(n, {})
        if copies:
            clear_up(self, n)
        for slot, producer in zip(step.inputs, step.producers, strict=True):
            if slot in copies:
                continue
            if self.values[slot] is None:
                self.run_again(producer)
            elif slot in self.output_versions and self.versions_of(slot) != self.output_versions[slot]:
                note_change(self.program, n, slot, self.values)
                self._check_output(producer)
        values = self._conditions(n, step) if step.is_conditional or copies else self.values
        with Attended(self) as attendant:
            attendant.begin(n, with_tape=with_tape)  # with gradients, which one of the contexts may turn off
            with ContextStack() as contexts:
                contexts.enter(step.contexts)
                made = step.run_again(values)
                if (tape := self.program.rests.tapes.get(n)) is not None:
                    tape.fill(self.values, made[0])
            attendant.end(n)
        if self.watch is not None:
            self.watch.ended(step.operation.name, list(made), is_first=False)
        if not step.outputs or self.values[step.outputs[0]] is None:
            for slot, value in zip(step.outputs, made, strict=True):
                self.values[slot] = leaf_of(value)
                self.output_versions.pop(slot, None)

    def _conditions(self, n: int, step: Step) -> Any:
        """What an operation reads when it runs again: outside, the values of its first run."""
        values = self.values
        copies = self.copies.get(n, {})
        for slot in step.external:
            value, version = values[slot], self.versions[slot]
            if version is not None and slot not in copies and value._version != version:
                note_change(self.program, n, slot, values)
                name = self.program.traced.owned.get(self.program.traced.placeholders[slot], "")
                what = f"the parameter or buffer {name}" if name else f"an input of {step.operation.name}"
                raise modified(what, version, value)
        if not step.kept and not copies:
            return values
        values = list(values)
        for slot in step.kept:
            if slot in copies or (version := self.kept_versions.get((n, slot))) is None:
                continue
            if values[slot]._version != version:
                note_change(self.program, n, slot, self.values)
                raise modified(f"a buffer that {step.operation.name} reads", version, values[slot])
        for slot in {*step.kept, *copies}:
            own: Tensor = values[slot]
            values[slot] = copy_of(copies.get(slot, own))
        return values

    def versions_of(self, slot: int) -> list[int | None]:
        """Those of the tensors in a value of the table."""
        return [*map(version_of, tensors_of([self.values[slot]]))]

    def _check_output(self, n: int) -> None:
        for slot in self.steps[n].outputs:
            for t, version in zip(tensors_of([self.values[slot]]), self.output_versions.get(slot, ()), strict=False):
                if version is not None and t._version != version:
                    raise modified(f"the output of {self.steps[n].operation.name}", version, t)

    def forget(self) -> None:
        """Lets go of all that can be computed again."""
        for slot in self.program.made:
            self.values[slot] = None
        self.output_versions.clear()
        self.read.clear()
        self.released.clear()
        self.tapes.clear()
