"""Outputs that give up their memory in place, and get it again before their readers' backwards run: without hooks.

Where autograd holds the very tensor that an operation returned, that tensor can be empty from its last reader in the
forward until it is made again. A backward that ran in between would meet no values, so an output rests only where a
backward that tells runs before each of these, whatever gradients are asked for. Where a backward is differentiated
itself, gradients come from what it saved, too: then all is filled when it begins. It rests once: later backwards of a
retained graph find it filled.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .. import devices
from ..operations.evaluation import Constant
from ..operations.routes import Route
from ..operations.saved_tensors import Geometry, geometry_of
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ..schedules.simulator import Simulation, simulate
from ..schedules.uses import resting, resting_tapes
from .flow import Flow
from .instructions import Order, hooked_operations, made_again
from .resting_storages import RestingResult, RestingTape

EMPTY_SHAPE = (0,) * 16
"""Of what stands for a tensor that rests: with no shape of more than one element does it broadcast."""


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor that an operation returned, as its one output.

    Attributes:
        part: In which item of the output that owns its storage it lies, where that is a tuple; -1 where it is a tensor.
        is_view: Whether it is not that tensor itself, but a view of it.
        has_base: Whether it is a view of another tensor of its operation, which holds the memory and nobody knows.
        empty: A tensor of its type, on its device, with no elements.
    """

    part: int
    is_view: bool
    has_base: bool
    empty: Tensor

    @property
    def is_alone(self) -> bool:
        """Whether the memory is the tensor's own, and it is that of no tuple and no base."""
        return self.part < 0 and not (self.is_view or self.has_base)

    def by_itself(self) -> Form:
        """Of a tensor whose operation is made again, too."""
        return replace(self, part=-1, is_view=False)


class Resting:
    """A tensor in the storage of an output that rests.

    Args:
        place: Where executions note the tensor, in their tables.
        form: What it is.

    Attributes:
        count: Of those that hold the tensor when it goes to rest, once that is known; -1 before.
    """

    __slots__ = ("_form", "_storage", "count", "place")

    def __init__(self, place: int, form: Form) -> None:
        self.place, self._form, self.count = place, form, -1
        self._storage: StorageWeakRef | None = None  # that it gave up the first time

    def is_held(self, known: Collection[int]) -> bool:
        """Whether the memory that it gave up the first time is still there.

        Args:
            known: The addresses of the storages that the table holds, which may be.
        """
        storage = self._storage
        return storage is not None and storage.cdata not in known and not storage.expired()  # pyright: ignore

    def rest(self, values: list[Any], tensor: Tensor) -> None:
        """The tensor gives up its memory, unless others hold it than did the first time: they might read it."""
        form, base = self._form, tensor._base if self._form.has_base else None
        count = _num_holders(tensor) + (0 if base is None else _num_holders(base))
        if self.count < 0:
            self.count, self._storage = count, StorageWeakRef(tensor.untyped_storage())
        if count == self.count:
            reference = weakref.ref(tensor)
            values[self.place] = (reference, geometry_of(tensor)) if form.is_view else reference
            tensor.data = form.empty
            if base is not None:
                base.data = form.empty

    def fill(self, values: list[Any], output: Any) -> Any:
        """Gives the tensor the memory of the output, which was made again, if it lives; the output."""
        noted: Any = values[self.place]
        if noted is None:
            return output
        form = self._form
        reference, geometry = cast("tuple[weakref.ref[Tensor], Geometry]", noted) if form.is_view else (noted, None)
        if (tensor := reference()) is not None:
            tensor._fix_weakref()  # pyright: ignore
            again: Tensor = output if form.part < 0 else output[form.part]
            tensor.data = again if geometry is None else again.as_strided(*geometry)
        return output

    def resting(self, constant: Constant, tensor: str) -> Iterator[str]:
        """`rest` as lines of a function whose table of values is `v`."""
        own, form = constant(self), self._form
        if form.is_view or form.has_base:
            yield f"{own}.rest(v, {tensor})"
        else:
            yield f"if {tensor}._use_count() == {own}.count:"
            yield f"    v[{self.place}] = {constant(weakref.ref)}({tensor}); {tensor}.data = {constant(form.empty)}"
            yield f"else: {own}.rest(v, {tensor})"

    def filling(self, constant: Constant, output: str) -> Iterator[str]:
        """`fill` as such lines."""
        if self._form.is_view or self._form.part >= 0:
            yield f"{constant(self)}.fill(v, {output})"
        else:
            yield f"resting = v[{self.place}]"
            yield "resting = resting and resting()"
            yield f"if resting is not None: resting._fix_weakref(); resting.data = {output}"
            yield "del resting"


RestingOutput = Resting | RestingResult
"""By its tensor, or by its storage."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where gradients come into a graph.

    Attributes:
        slot: Of a value that the caller gets, or has given and that is written.
        leaf: Which of its tensors.
        is_base: Whether they come to what the tensor is a view of: so they do once the caller writes into the view.
    """

    slot: int
    leaf: int
    is_base: bool

    def node_of(self, tensor: Tensor) -> Any:
        """Autograd's node there, if there is one."""
        of = tensor._base if self.is_base else tensor
        return None if of is None else of.grad_fn


def _num_holders(tensor: Tensor) -> int:
    """How many hold the tensor, all of Python as one."""
    return cast(Any, tensor)._use_count()


@dataclass(frozen=True, slots=True)
class Rests:
    """What rests in a program.

    Attributes:
        operations: Those whose saved tensors need no hooks for it.
        told: Those whose backwards tell that they begin, so that what rests is filled.
        tensors: Of each operation whose output gives up its memory, that tensor.
        filled: Of operations that are made again, what rests and is read and gets the memory of their outputs.
        tapes: Of each operation whose tape gives up its memory, that tape.
        last_fill: The place among the backwards before which the last of all is made again.
        sources: Where gradients come in: before a backward that is differentiated itself all that rests is filled.
        unproven: Those of which it is not known whether others hold their memory, too.
    """

    operations: frozenset[int] = frozenset()
    told: frozenset[int] = frozenset()
    tensors: Mapping[int, RestingOutput] = field(default_factory=dict[int, RestingOutput])
    filled: Mapping[int, tuple[RestingOutput, ...]] = field(default_factory=dict[int, tuple[RestingOutput, ...]])
    tapes: Mapping[int, RestingTape] = field(default_factory=dict[int, RestingTape])
    last_fill: int = -1
    sources: tuple[Entry, ...] = ()
    unproven: list[Resting] = field(default_factory=list[Resting])

    def __bool__(self) -> bool:
        """Whether anything rests."""
        return bool(self.filled or self.tapes)


def rests_of(
    graph: Graph,
    schedule: Schedule,
    order: Order,
    forms: Mapping[int, Form],
    results: Collection[int],
    routes: Mapping[int, Sequence[Route]],
    flow: Flow,
    first: int,
) -> Rests:
    """What can rest.

    Args:
        graph: The profile: what each backward reads, and what autograd holds of it.
        schedule: A valid one.
        order: That of the schedule.
        forms: Of the operations that return one tensor.
        results: Those of them that have saved it for their own backwards, so that only its storage can rest.
        routes: Of operations, those to their tapes.
        flow: How gradients flow.
        first: The first place of tables that is free.
    """
    resting_roots = {n for n in resting(graph, schedule) if graph.roots[n] == n}
    again = made_again(schedule)
    simulation = simulate(graph, schedule)
    tapes_again = _tapes_made_again(graph, schedule, simulation, routes)
    sizes = {n: graph.nodes[n].output_bytes for n in resting_roots.intersection(results, forms)}
    with_storage = _with_room(graph, simulation, {n: again[n][0] for n in sizes}, sizes)
    hooked = set(hooked_operations(schedule, graph, order, resting_roots, tapes_again))
    needs = dict[int, set[int]]()  # operation -> outputs that must be filled before its backward
    for m in hooked_operations(schedule, graph, order) - hooked:
        node = graph.nodes[m]
        needs[m] = {r for r in node.held if r in resting_roots}
        is_known = all(i in forms for i in node.inputs if graph.roots[i] in needs[m])
        if not is_known or (m in needs[m] and m not in with_storage):
            hooked.add(m)
    again = {n: place for n, (_, place) in again.items()}
    fills = {*again.values(), *tapes_again.values()}
    told = {n for place in fills if flow.is_told(n := order.backwards[place]) and n not in hooked}
    for m in sorted(needs.keys() - hooked, key=order.place.__getitem__):
        since = max(*(again[r] for r in needs[m]), tapes_again.get(m, -1), -1)
        between = order.backwards[since : order.place[m] + 1]
        telling = [a for a in between if a in told or (a in hooked and flow.is_one_node(a))]
        # Those that tell anyway come first; to ask of one what runs after it takes a look at all.
        others = (a for a in between if a not in hooked and flow.is_told(a))
        a = next((a for a in (*telling, *others) if flow.has_run_before(a, m)), None)
        if a is None:
            hooked.add(m)
        elif a not in hooked:
            told.add(a)
    bare = needs.keys() - hooked
    roots = {r for m in bare for r in needs[m]}
    stored = {m for m in bare if m in needs[m]}
    read = {i for m in bare for i in graph.nodes[m].inputs if graph.roots[i] in needs[m]}
    # A view holds its base, too. Of what nobody reads nothing is left.
    family = [n for n, root in enumerate(graph.roots) if n in forms and (n in read or (n == root and n in roots))]
    # What is made again with its base is filled by that run, and nobody needs to know how it lies in the base.
    filler = {n: n if again.get(n) == again[root := graph.roots[n]] else root for n in family}
    tensors = dict[int, RestingOutput]()
    for place, n in enumerate(family, first):
        form = forms[n].by_itself() if filler[n] == n else forms[n]
        tensors[n] = RestingResult(place, graph.nodes[n].name) if n in stored else Resting(place, form)
    filled = dict[int, tuple[RestingOutput, ...]]()
    for n in sorted(stored | read.intersection(family)):
        filled[filler[n]] = (*filled.get(filler[n], ()), tensors[n])
    first += len(family)
    taped = sorted(bare & tapes_again.keys())
    tapes = {m: RestingTape(first + k, graph.nodes[m].name, routes[m]) for k, m in enumerate(taped)}
    last_fill = max((*(again[r] for r in roots), *(tapes_again[m] for m in tapes)), default=-1)
    unproven = [tensor for tensor in tensors.values() if isinstance(tensor, Resting)]
    return Rests(frozenset(bare), frozenset(told), tensors, filled, tapes, last_fill, unproven=unproven)


def _tapes_made_again(
    graph: Graph, schedule: Schedule, simulation: Simulation, routes: Iterable[int]
) -> dict[int, int]:
    """For each operation whose tape can rest, how many backwards have run when it is made again."""
    found = resting_tapes(graph, schedule).intersection(routes)
    again = dict[int, tuple[int, int]]()
    has_run, place = set[int](), 0
    for position, (kind, n) in enumerate(schedule):
        place += kind == "B"
        if kind == "F" and n in found and n in has_run:
            again[n] = position, place
        has_run |= {n} if kind == "F" else set[int]()
    tapes = {n: graph.nodes[n].tape_bytes for n in again}
    has_room = _with_room(graph, simulation, {n: position for n, (position, _) in again.items()}, tapes)
    return {n: place for n, (_, place) in again.items() if n in has_room}


def _with_room(
    graph: Graph, simulation: Simulation, again: Mapping[int, int], copied_bytes: Mapping[int, int]
) -> Collection[int]:
    """The operations that can be made again, at these actions, with a copy of so much of what that makes.

    Where memory cannot be handed over it is copied while that of the recomputation lives, which must not make a new
    peak: beside it is the loss.
    """
    if devices.can_exchange_memory:
        return again.keys()
    alive, workspace = simulation.memory_bytes, [node.forward_workspace_bytes for node in graph.nodes]
    needed = {n: alive[again[n]] - workspace[n] + size for n, size in copied_bytes.items()}
    return {n for n, size in needed.items() if size < simulation.peak_bytes}
