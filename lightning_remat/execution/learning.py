"""What a first execution finds out: where saved tensors belong, by the storages that live then, and what can rest."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from ..capture.unseen_writes import UNSEEN_WRITES
from ..devices import most_refilled_bytes
from ..measure.meter import tensor_storage
from ..operations.evaluation import slots
from ..operations.routes import Route, routes_to_storages
from ..operations.saved_tensors import (
    ExternalRef,
    Leaf,
    OutputRef,
    TapeRef,
    classify,
    storage_key,
    storage_keys,
    storage_owners,
    tensors_of,
)
from .flow import Flow, age, next_age, reached
from .instructions import Order
from .places import ELSEWHERE, TAPE, Place, Places
from .program import Program, Step
from .resting import EMPTY_SHAPE, Entry, Form, Rests, rests_of


class Learning:
    """What is noted while an execution runs its forward for the first time.

    Args:
        program: What is executed.
        values: The table of the execution.
        num_given: How many of the values are those of placeholders.

    Attributes:
        is_first: Whether it is not known yet what can rest.
    """

    def __init__(self, program: Program, values: list[Any], num_given: int) -> None:
        self.program, self.values = program, values
        self.is_first = program.variants == [program]
        self.leaves: list[list[Leaf]] = [[] for _ in program.steps]
        self.homes: list[list[tuple[int, int]]] = [[] for _ in program.steps]  # where these are, see `Place`
        self.slot_of = slots(program.traced)
        self._given = values[:num_given]
        self.given = tensors_of(self._given)
        self._given_nodes = {t.grad_fn for t in self.given if t.grad_fn is not None}
        self._effects: set[int] = set()  # the storages of what these made for others
        self.external = storage_keys(self.given)
        # Autograd's nodes of the outputs, by their ages: the nodes would hold what is saved, and some go meanwhile.
        self._ages: dict[int, set[int]] = {}
        self.forms: dict[int, Form] = {}
        self.devices: set[torch.device] = set()  # of what has gradients
        self._empty: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._since = 0
        self._routes: dict[int, dict[int, Route]] = {}  # to what is saved of an operation whose tape may rest
        self._tapes: dict[int, tuple[list[Route], list[StorageWeakRef]]] = {}  # where they lead to
        self._results: dict[int, StorageWeakRef] = {}  # of outputs that were saved for their own operations' backwards
        self._stored: dict[int, int] = {}  # whose these are, by the keys of the storages
        self._maker = cast("dict[Tensor, int]", WeakIdKeyDictionary())  # of tensors that are the only output

    def begin(self) -> None:
        """An operation runs for the first time: autograd's nodes from here on are its own."""
        self._since = next_age()

    def note(self, n: int) -> None:
        """Operation n has run; its outputs are in the table."""
        outputs = self.program.steps[n].outputs
        self._note_effects(self.program.steps[n])
        tensors = tensors_of(self.values[slot] for slot in outputs)
        self.leaves[n] = [Leaf.of(t) for t in tensors]
        self.homes[n] = [home for slot in outputs for home in _homes(slot, self.values[slot])]
        if not self.is_first:
            return
        for key in storage_keys(tensors) & self._stored.keys():  # others read it when the first is done
            self._results.pop(self._stored[key], None)
        if n not in self._ages:
            self._find_tape(n, tensors)
        self._ages[n] = {age(t.grad_fn) for t in tensors if t.grad_fn is not None}
        self.devices |= {t.device for t in tensors if t.requires_grad}
        is_one = len(outputs) == 1 and isinstance(self.values[outputs[0]], Tensor)
        # Where several return one tensor, others still read it when the first is done: it rests for none of them.
        others = {maker for t in tensors if (maker := self._maker.get(t)) is not None}
        for maker in others:
            self.forms.pop(maker, None)
        if is_one:
            self._maker[tensors[0]] = n
            if not others and (form := self._form(n, tensors[0])) is not None:
                self.forms[n] = form
                storage = tensors[0].untyped_storage()
                if n in self.program.graph.nodes[n].held and form.is_alone and storage.resizable():
                    self._results[n] = StorageWeakRef(storage)
                    self._stored[storage._cdata] = n  # pyright: ignore

    def _find_tape(self, n: int, made: list[Tensor]) -> None:
        """Notes the routes to what autograd saves of an operation whose tape may rest, while hooks hand it over."""
        step = self.program.steps[n]
        can_rest = self.program.graph.nodes[n].is_tape_held and len(step.outputs) == 1
        if can_rest and step.is_hooked and step.is_taped and not step.keeps_tape:
            homes = zip(self.homes[n], made, strict=True)
            found = {"" if part < 0 else f"[{part}]": t for (slot, part), t in homes if slot != ELSEWHERE}
            self._routes[n] = routes_to_storages(found, self._since)

    def _note_effects(self, step: Step) -> None:
        if step.effects:
            self._effects |= storage_keys(tensors_of(self.values[slot] for slot in step.effects))
            self.external |= self._effects
        if any(part.target in UNSEEN_WRITES for part in step.operation.effects):  # parameters have other memory now
            self.external = storage_keys(self.given) | self._effects

    def _form(self, n: int, output: Any) -> Form | None:
        """What the only output of an operation is, if that is a plain tensor, and its storage that of one."""
        root = self.program.graph.roots[n]
        if type(output) is not Tensor or output.numel() < 2 or len(self.program.steps[root].outputs) != 1:
            return None
        base = output._base
        if n == root and base is not None and base.dtype != output.dtype:
            return None
        key, own = storage_key(output), self.leaves[n][0]
        for leaf, (slot, part) in zip(self.leaves[root], self.homes[root], strict=True):
            if (
                slot != ELSEWHERE
                and (part < 0 or base is None)
                and leaf.key == key
                and leaf.dtype == own.dtype
                and not leaf.is_lazy | own.is_lazy
            ):
                kind = output.dtype, output.device
                if kind not in self._empty:
                    self._empty[kind] = torch.empty(EMPTY_SHAPE, dtype=kind[0], device=kind[1])
                # A view that is the whole now is a part of a larger batch, perhaps.
                is_itself = n == root or (part >= 0 and self._is_item(n, output))
                return Form(part, not is_itself, n == root and base is not None, self._empty[kind])
        return None

    def _is_item(self, n: int, output: Tensor) -> bool:
        """Whether an operation has taken its output out of a tuple that it read."""
        read = (self.values[slot] for slot in self.program.steps[n].inputs)
        return any(t is output for value in read if not isinstance(value, Tensor) for t in tensors_of([value]))

    def rests(self, returned: Mapping[int, Any]) -> Rests:
        """What can rest in further calls, once the forward has run: nothing where threads of two devices run it.

        Args:
            returned: What the caller gets, by slots.
        """
        if len(self.devices) > 1 or self.program.kinds[0].is_fake:
            return Rests()
        program = self.program
        sources = dict(self._sources({**dict(enumerate(self._given)), **returned}))
        nodes = sources.values()
        alive = {age(node): node for node in reached(nodes, dict.fromkeys(self._given_nodes, -1), 0)}
        ends = {n: {alive[k] for k in ages if k in alive} for n, ages in self._ages.items()}
        flow = Flow(ends, self._given_nodes, nodes)
        for t in tensors_of(value for value in self.values if not isinstance(value, Tensor)):
            self.forms.pop(self._maker.get(t, -1), None)  # an item of a tuple that is read again
        order = Order.of(program.traced, program.schedule)
        routes = {n: routes for n, (routes, _) in self._tapes.items()}
        gone = {n for n, storage in self._results.items() if storage.expired()}  # pyright: ignore
        graph, schedule = program.graph, program.schedule
        found = rests_of(graph, schedule, order, self.forms, gone, routes, flow, program.num_slots)
        return replace(found, sources=tuple(sources))

    def _sources(self, values: Mapping[int, Any]) -> Generator[tuple[Entry, Any]]:
        """Where gradients come from, with the nodes: what the caller gets, and what was given and is written."""
        for slot, value in values.items():
            for k, t in enumerate(tensors_of([value])):
                for entry in (Entry(slot, k, is_base=False), Entry(slot, k, is_base=True)):
                    if (node := entry.node_of(t)) is not None and node not in self._given_nodes:
                        yield entry, node

    def places(self, n: int, saved: list[Tensor]) -> Places:
        """Where the tensors belong that operation n has just saved; its inputs live, so that storages tell."""
        step = self.program.steps[n]
        witnesses: dict[int | None, tuple[int, int]] = {}
        for slot in (*step.inputs, *step.outputs):
            for k, t in enumerate(tensors_of([self.values[slot]])):
                witnesses.setdefault(storage_key(t), (slot, k))
        owners = storage_owners(self.program.traced.operations, self.leaves, n)
        found: list[Place] = []
        sources = classify(saved, owners, self.external)
        numbers: defaultdict[int, list[int]] = defaultdict(list)
        for k, source in enumerate(sources):
            if isinstance(source, OutputRef) and storage_key(saved[k]) in witnesses:
                numbers[source.operation].append(k)
        whole: list[tuple[int, int, int]] = []
        parts: list[int] = []
        for k, (tensor, source) in enumerate(zip(saved, sources, strict=True)):
            witness = witnesses.get(storage_key(tensor))
            if isinstance(source, OutputRef) and witness is not None:
                slot, part = self.homes[source.operation][source.leaf]
                if source.geometry is None and (seen := self._seen(source, slot, part, witness[0])) is not None:
                    whole.append((k, *seen))
                else:
                    parts.append(k)
                is_last = source.operation in self.program.released[n]
                fellows = tuple(m for m in numbers[source.operation] if m != k)
                owner = ELSEWHERE if step.may_keep else slot
                is_alone = is_last and not fellows and len(self.program.steps[source.operation].outputs) == 1
                is_whole = source.geometry is None
                found.append(Place(source, *witness, owner, part, is_whole, is_last, is_alone, fellows))
            elif isinstance(source, ExternalRef):
                found.append(Place(source))
            else:  # where nothing that it sees lives in that storage, the tensor is its own
                found.append(Place(TapeRef(), owner=ELSEWHERE if step.may_keep else TAPE))
        own = tuple(k for k, place in enumerate(found) if isinstance(place.source, TapeRef))
        self._note_tape(n, [saved[k] for k in own], owners)
        made = {storage_key(t) for t in tensors_of(self.values[slot] for slot in step.outputs)}
        outside = (k for k, place in enumerate(found) if isinstance(place.source, ExternalRef))
        return Places(
            tuple(found), tuple(whole), tuple(parts), own, tuple(k for k in outside if storage_key(saved[k]) in made)
        )

    def _note_tape(self, n: int, tape: list[Tensor], owners: Mapping[int, Any]) -> None:
        """Notes the routes to a tape, if they are known to all of it, and if none of it is part of something else."""
        routes = self._routes.pop(n, {})
        storages = {key: storage for t in tape if (key := storage_key(t)) and (storage := tensor_storage(t))}
        can_rest = all(most_refilled_bytes(s.device) and s.resizable() for s in storages.values())
        is_all = storages and routes.keys() >= storages.keys() == {storage_key(t) for t in tape}
        if is_all and can_rest and owners.keys().isdisjoint(storages):
            self._tapes[n] = [routes[key] for key in storages], [*map(StorageWeakRef, storages.values())]

    def tape_has_gone(self, n: int) -> None:
        """The tape of an operation has just been let go of: what is left of it is others', as of autocast's casts."""
        if n in self._tapes and any(not storage.expired() for storage in self._tapes[n][1]):  # pyright: ignore
            del self._tapes[n]

    def _seen(self, source: OutputRef, slot: int, part: int, witness: int) -> tuple[int, int] | None:
        """Where the table holds an output tensor now: in its home, or as an item that was taken out of the tuple."""
        if slot == ELSEWHERE:
            return None
        if self.values[slot] is not None:
            return slot, part
        (home,) = (n for n in self.program.traced.operations[source.operation].outputs if self.slot_of[n] == slot)
        is_taken = any(
            n.target is operator.getitem and n.args == (home, part) and self.slot_of.get(n) == witness
            for n in home.users
        )
        return (witness, -1) if is_taken else None


def _homes(slot: int, value: Any) -> list[tuple[int, int]]:
    """For each tensor of an output, its slot and which item of a tuple it is; `ELSEWHERE` for those that lie deeper."""
    if isinstance(value, Tensor):
        return [(slot, -1)]
    if isinstance(value, (tuple, list)) and all(isinstance(t, Tensor) for t in cast("list[Any]", value)):
        return [(slot, part) for part in range(len(cast("list[Any]", value)))]
    return [(ELSEWHERE, -1)] * len(tensors_of([value]))
