"""A schedule compiled for the executor: what happens in the forward and before each backward, as straight lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, cast

from torch import fx
from torch.fx.node import map_arg
from torch.nn import functional

from ..errors import ScheduleError
from ..operations.contexts import Context, common_contexts, contexts_of
from ..operations.evaluation import Run, compile_constant, compile_operation, effect_outputs, slots
from ..operations.operation import Operation, TracedModule
from ..operations.saved_tensors import Source
from ..schedules.graph import Graph
from ..schedules.schedule import Action, Schedule, mark


class Do(IntEnum):
    """What an instruction does with its operation."""

    RUN = 0  # for the first time
    RUN_AGAIN = 1
    DROP = 2  # the table lets go of the output; what autograd itself has saved lives on
    DROP_TAPE = 3
    SLEEP = 4  # the output gives up its memory, to be filled again within the forward
    COMPUTE = 5  # a constant


Instruction = tuple[Do, int]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a saved tensor was found to belong.

    Attributes:
        source: Its owner.
        slot: For a tensor in an output's storage, a value that the operation reads or makes in the same storage.
        leaf: Which tensor of that value.
    """

    source: Source
    slot: int = -1
    leaf: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One operation as the executor sees it; values have the numbers of `slots`.

    Attributes:
        operation: Its description.
        run: The first run.
        run_again: A recomputation.
        outputs: Where its outputs go.
        effects: Where those of its effects go that others read.
        inputs: What it reads that operations make.
        producers: Which operations make these.
        external: What it reads from outside and a recomputation must find unchanged.
        scratch: What it writes outside; a recomputation writes into copies.
        kept: What it reads outside though the graph writes it: a recomputation reads copies made at the first run.
        is_hooked: Whether something that its backward reads is discarded before: autograd then gets references.
        is_announced: Whether its backward must tell that it begins, though it may ask for nothing.
        is_output: Whether the caller gets what it makes.
        is_repeated: Whether the schedule runs it more than once.
        contexts: Those in which all of it was recorded.
        is_plain: Whether a first run is nothing but the call.
    """

    operation: Operation
    run: Run
    run_again: Run
    outputs: tuple[int, ...]
    effects: tuple[int, ...]
    inputs: tuple[int, ...]
    producers: tuple[int, ...]
    external: tuple[int, ...]
    scratch: tuple[int, ...]
    kept: tuple[int, ...]
    is_hooked: bool
    is_announced: bool
    is_output: bool
    is_repeated: bool
    contexts: tuple[Context, ...]
    is_plain: bool


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """What the executor follows; holds no module's tensors, so that copies of a module share it.

    Attributes:
        traced: The operations.
        schedule: The actions.
        steps: One for each operation.
        num_slots: How many values there are; those of the placeholders come first.
        fetched: Values that the graph holds itself: slot and value.
        constants: How each is computed, and its slot.
        forward: What the forward does.
        backwards: The operations in the order of their backwards.
        before: For each entry of `backwards`, what happens right before it.
        place: For each operation, its place in `backwards`.
        released: For each operation, whose outputs the table lets go of once its backward has read them.
        hooked: The operations of which autograd gets references.
        revived: The operations that run again before the first backward.
        result: What the caller gets: slots in place of fx nodes.
        learned: For each hooked operation, where its saved tensors were found to belong.
    """

    traced: TracedModule
    schedule: Schedule
    steps: tuple[Step, ...]
    num_slots: int
    fetched: tuple[tuple[int, Any], ...]
    constants: tuple[tuple[Run, int], ...]
    forward: tuple[Instruction, ...]
    backwards: tuple[int, ...]
    before: tuple[tuple[Instruction, ...], ...]
    place: tuple[int, ...]
    released: tuple[frozenset[int], ...]
    hooked: frozenset[int]
    revived: frozenset[int]
    result: Any
    learned: dict[int, tuple[Place, ...]] = field(default_factory=dict[int, "tuple[Place, ...]"])

    def __deepcopy__(self, memo: Any) -> Program:
        return self  # bound to no module

    def __reduce__(self) -> Any:
        return _nothing, ()  # pickling a rewritten module yields the plain module


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class SlotOf:
    """Stands for a value in what the caller gets."""

    slot: int


def compile_schedule(traced: TracedModule, schedule: Schedule, graph: Graph) -> Program:
    """The program of a valid schedule.

    Args:
        traced: The operations.
        schedule: Valid on the graph, as `simulate` judges.
        graph: The profile of these operations: what each backward reads.

    Raises:
        ScheduleError: Backwards are not in autograd's order, the reverse of that of the first runs.
    """
    order = _Order.of(traced, schedule)
    slot_of = slots(traced)
    hooked = _hooked(schedule, graph)
    constants_after = _constants_after(traced, order.first_runs)
    lines = _instructions(traced, schedule, graph, hooked, order, constants_after)
    announced = {n for k, n in enumerate(order.backwards) if any(what == Do.RUN_AGAIN for what, _ in lines.before[k])}
    constants = tuple((compile_constant(c, slot_of), slot_of[c]) for c in traced.constants)
    has_contexts = any(contexts_of(p) for o in traced.operations for p in o.parts)
    runs = Counter(n for kind, n in schedule if kind == "F")
    steps = (
        _step(
            traced,
            n,
            slot_of,
            is_hooked=n in hooked,
            is_announced=n in announced,
            is_repeated=runs[n] > 1,
            has_contexts=has_contexts,
        )
        for n in range(len(traced.operations))
    )
    return Program(
        traced,
        schedule,
        tuple(steps),
        len(slot_of),
        tuple((slot_of[n], value) for n, value in traced.fetched().items()),
        constants,
        lines.forward,
        order.backwards,
        lines.before,
        order.place,
        lines.released,
        hooked,
        order.revived,
        map_arg(traced.output_node.args[0], lambda n: cast(Any, SlotOf(slot_of[n]))),
    )


def _step(
    traced: TracedModule,
    n: int,
    slot_of: dict[fx.Node, int],
    *,
    is_hooked: bool,
    is_announced: bool,
    is_repeated: bool,
    has_contexts: bool,
) -> Step:
    operation = traced.operations[n]
    own = [p for p in operation.parts if p not in operation.effects]
    read = tuple(dict.fromkeys(i for p in own for i in p.all_input_nodes if i not in operation.parts))
    made = [i for i in read if i in traced.producer]
    # Effects that others read live in the storage of what they write.
    written = traced.written | {i for i in read if any(i in o.effects for o in traced.operations)}
    external = [i for i in read if i.op == "placeholder" or i in written]
    kept = tuple(slot_of[i] for i in external if i in written and not _only_writes(own, i))
    effects = tuple(slot_of[p] for p in effect_outputs(operation))
    is_output = n in traced.outputs
    is_special = is_hooked or is_announced or is_output or has_contexts or operation.is_random or bool(kept or effects)
    return Step(
        operation,
        compile_operation(operation, slot_of, is_first=True),
        compile_operation(operation, slot_of, is_first=False),
        tuple(slot_of[p] for p in operation.outputs),
        effects,
        tuple(slot_of[i] for i in made),
        tuple(traced.producer[i] for i in made),
        tuple(slot_of[i] for i in external if i not in written),
        tuple(slot_of[i] for i in operation.writes if i in slot_of),
        kept,
        is_hooked,
        is_announced,
        is_output,
        is_repeated,
        common_contexts(operation.parts),
        not is_special,
    )


def _only_writes(parts: Sequence[fx.Node], buffer: fx.Node) -> bool:
    """Whether no result depends on the buffer: batch norm in training only writes its statistics."""
    readers = [p for p in parts if buffer in p.all_input_nodes]
    return all(p.target is functional.batch_norm and p.args[5:6] == (True,) for p in readers)


@dataclass(frozen=True, slots=True)
class _Order:
    """What a schedule says about first runs and backwards."""

    first_runs: tuple[int, ...]
    backwards: tuple[int, ...]
    place: tuple[int, ...]
    revived: frozenset[int]
    split: int  # the first action that belongs to the backward: the loss stands before it

    @classmethod
    def of(cls, traced: TracedModule, schedule: Schedule) -> _Order:
        first_runs: list[int] = []
        has_run: set[int] = set()
        backwards: list[int] = []
        revived: set[int] = set()
        split = len(schedule.actions)
        for position, (kind, n) in enumerate(schedule):
            is_complete = len(first_runs) == len(traced.operations)
            if kind == "B":
                expected = first_runs[len(first_runs) - 1 - len(backwards)]
                if not is_complete or n != expected:
                    raise ScheduleError(
                        f"{mark(schedule, position)}\naction {position}: autograd runs backwards in the reverse order "
                        f"of the first runs, all of which come first; here it runs B{expected}",
                        position=position,
                    )
                split = min(split, position)
                backwards.append(n)
            elif kind == "F" and is_complete:
                split = min(split, position)
            elif kind == "F" and n in has_run:
                revived.add(n)
            elif kind == "F":
                has_run.add(n)
                first_runs.append(n)
        place = [0] * len(backwards)
        for k, n in enumerate(backwards):
            place[n] = k
        return cls(tuple(first_runs), tuple(backwards), tuple(place), frozenset(revived), split)


def _hooked(schedule: Schedule, graph: Graph) -> frozenset[int]:
    """The operations of whose saved values some is discarded between the first run and the backward."""
    has_run: set[int] = set()
    readers: dict[int, list[int]] = {}
    found: set[int] = set()
    for n, node in enumerate(graph.nodes):
        for j in node.saved:
            readers.setdefault(j, []).append(n)
    done: set[int] = set()
    for kind, n in schedule:
        if kind == "F":
            has_run.add(n)
        elif kind == "B":
            done.add(n)
        elif kind == "T" and n not in done:
            found.add(n)
        elif kind == "D":
            found.update(m for m in readers.get(n, ()) if m in has_run and m not in done)
    return frozenset(found)


@dataclass(slots=True)
class _Lines:
    forward: tuple[Instruction, ...]
    before: tuple[tuple[Instruction, ...], ...]
    released: tuple[frozenset[int], ...]


def _instructions(
    traced: TracedModule,
    schedule: Schedule,
    graph: Graph,
    hooked: frozenset[int],
    order: _Order,
    constants_after: dict[int, list[int]],
) -> _Lines:
    """The actions as instructions; the table holds an output from its run to the last time that something reads it.

    That is a run of another operation, or the backward of a hooked one; others hold what they read themselves.
    """
    actions = list(schedule)
    drops, released = _last_reads(traced, actions, graph, hooked)
    forward: list[Instruction] = [(Do.COMPUTE, c) for c in constants_after.get(-1, ())]
    before: list[list[Instruction]] = []
    pending: list[Instruction] = []
    has_run: set[int] = set()
    for position, (kind, n) in enumerate(actions):
        into = forward if position < order.split else pending
        if kind == "B":
            before.append(pending)
            pending = [(Do.DROP, j) for j in sorted(released.get(n, ()))]
            continue
        if kind == "F":
            if n in has_run:
                into.append((Do.RUN_AGAIN, n))
            else:
                has_run.add(n)
                into.append((Do.RUN, n))
                into += [(Do.COMPUTE, c) for c in constants_after.get(n, ())]
        elif kind == "T":
            into.append((Do.DROP_TAPE, n))
        elif order.revived and position < order.split:
            into.append((Do.SLEEP, n))
        into += [(Do.DROP, j) for j in drops.get(position, ()) if not (order.revived and position < order.split)]
    place_of = {n: frozenset(found) for n, found in released.items()}
    return _Lines(
        tuple(forward),
        tuple(map(tuple, before)),
        tuple(place_of.get(n, frozenset()) for n in range(len(traced.operations))),
    )


def _last_reads(
    traced: TracedModule, actions: Sequence[Action], graph: Graph, hooked: frozenset[int]
) -> tuple[dict[int, list[int]], dict[int, set[int]]]:
    """Where the table lets go of each output: position of a run → outputs; hooked operation → outputs."""
    last: dict[int, int] = {}  # output in the table -> position of its last read so far
    drops: dict[int, list[int]] = {}
    released: dict[int, set[int]] = {}
    readers_of_constants = _constant_inputs(traced)

    def settle(n: int) -> None:
        position = last.pop(n, None)
        if position is None:
            return
        kind, m = actions[position]
        if kind == "F":
            drops.setdefault(position, []).append(n)
        else:
            released.setdefault(m, set()).add(n)

    for position, (kind, n) in enumerate(actions):
        if kind == "F":
            for j in (*traced.operations[n].inputs, *readers_of_constants.get(n, ())):
                if j in last:
                    last[j] = position
            last.setdefault(n, position)
        elif kind == "B" and n in hooked:
            for j in graph.nodes[n].saved:
                if j in last:
                    last[j] = position
        elif kind == "D":
            settle(n)
    for n in list(last):
        settle(n)
    return drops, released


def _constant_inputs(traced: TracedModule) -> dict[int, list[int]]:
    """For each operation, those whose values the constants read that are computed right after its first run."""
    after = _constants_after(traced, range(len(traced.operations)))
    return {
        n: [traced.producer[i] for c in found for i in traced.constants[c].all_input_nodes if i in traced.producer]
        for n, found in after.items()
        if n >= 0
    }


def _constants_after(traced: TracedModule, order: Sequence[int]) -> dict[int, list[int]]:
    """For each operation, the constants (their numbers) that become known with it; -1: with the inputs."""
    rank = {n: k for k, n in enumerate(order)}
    home = {p: n for n, o in enumerate(traced.operations) for p in o.effects}
    ready: dict[fx.Node, int] = {}
    after: dict[int, list[int]] = {}
    for number, constant in enumerate(traced.constants):
        known = [ready.get(i, traced.producer.get(i, home.get(i, -1))) for i in constant.all_input_nodes]
        ready[constant] = max(known, key=lambda n: rank.get(n, -1), default=-1)
        after.setdefault(ready[constant], []).append(number)
    return after
