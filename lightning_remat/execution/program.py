"""A schedule compiled for the executor: what happens in the forward and before each backward, as straight lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg

from ..errors import MismatchError
from ..operations.contexts import Context, common_contexts
from ..operations.evaluation import (
    Run,
    Stretch,
    compile_constant,
    compile_operation,
    effect_outputs,
    only_written,
    slots,
)
from ..operations.functions import may_keep_what_it_reads
from ..operations.operation import Operation, TracedModule
from ..plans.plan import Plan
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from .instructions import Do, Instruction, Order, constants_after, hooked_operations, instructions_of
from .modified import known_changes
from .places import Places
from .resting import Rests
from .stretches import Part, Stretches, indifferent_operations, needs_gradients


@dataclass(frozen=True, slots=True)
class Kinds:
    """Of what kind the values are with which a program runs: the same at each call, as TorchDynamo guards.

    Attributes:
        devices: Those of the tensors, the host left out.
        types: All of their types of device, as autocast knows them.
        is_fake: Whether tensors have no values.
    """

    devices: tuple[torch.device, ...]
    types: tuple[str, ...]
    is_fake: bool

    @classmethod
    def of(cls, values: Iterable[Any]) -> Kinds:
        """Those of the placeholders' values."""
        tensors = [v for v in values if isinstance(v, Tensor)]
        found = dict.fromkeys(t.device for t in tensors)
        devices = tuple(d for d in found if d.type not in ("cpu", "meta"))
        types = tuple(sorted({"cpu", *(d.type for d in devices)}))
        return cls(devices, types, any(isinstance(t, FakeTensor) for t in tensors))


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
        kept: What it reads outside though the graph writes it: a recomputation reads copies made at the first run.
        is_hooked: Whether something that its backward reads is discarded before: autograd then gets references.
        is_announced: Whether its backward must tell that it begins, though it may ask for nothing.
        is_output: Whether the caller gets what it makes.
        is_repeated: Whether the schedule runs it more than once.
        is_taped: Whether its tape is discarded before its backward: else the references hold that.
        keeps_tape: Whether it is not discarded at once.
        contexts: Those in which all of it was recorded.
        is_plain: Whether a first run is nothing but the call, within its beginning and end where it is attended.
        is_attended: Whether the executor must know of the beginning and the end of a first run.
        is_plain_again: Whether a recomputation is, as long as what it reads from outside has not changed.
        is_attended_again: Whether more is wanted of a recomputation than its outputs, see `Attended`.
        is_conditional: Whether a recomputation must look at what it reads from outside.
        may_keep: Whether its backward may read inputs that it did not save.
    """

    operation: Operation
    run: Run
    run_again: Run
    outputs: tuple[int, ...]
    effects: tuple[int, ...]
    inputs: tuple[int, ...]
    producers: tuple[int, ...]
    external: tuple[int, ...]
    kept: tuple[int, ...]
    is_hooked: bool
    is_announced: bool
    is_output: bool
    is_repeated: bool
    is_taped: bool
    keeps_tape: bool
    contexts: tuple[Context, ...]
    is_plain: bool
    is_attended: bool
    is_plain_again: bool
    is_attended_again: bool
    is_conditional: bool
    may_keep: bool


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """What the executor follows; holds no module's tensors, so that copies of a module share it.

    Attributes:
        traced: The operations.
        schedule: The actions.
        graph: The profile of the operations.
        steps: One for each operation.
        made: The places of all outputs.
        left: The operations whose outputs the forward leaves in the table.
        returned: Those of outputs that the caller gets.
        num_slots: How many places the table has: those of the placeholders come first, those of what rests last.
        fetched: Values that the graph holds itself: slot and value.
        constants: How each is computed, and its slot.
        forward: What the forward does.
        stretches: The same where nobody watches single operations: those that follow one another are one function.
        backwards: The operations in the order of their backwards.
        before: For each entry of `backwards`, what happens when it tells that it begins, back to the one that told
            before; nothing for those that do not tell.
        busy: The places in `backwards` before which something happens, and the number of backwards.
        recomputes: For each entry of `backwards`, whether operations run again then that need gradients.
        place: For each operation, its place in `backwards`.
        released: For each operation, whose outputs the table lets go of once its backward has read them.
        hooked: The operations of which autograd gets references.
        revived: The operations that run again before the first backward.
        result: What the caller gets: slots in place of fx nodes.
        rests: What gives up its memory in place.
        variants: The program in which nothing rests, and once it has run the one by which further calls run.
        copied: Operations, and what they read outside, of which a recomputation was seen to need the former value.
        learned: For each hooked operation, where its saved tensors were found to belong.
        differentiable: Of what operations read of which more is wanted than their outputs, the slots of all to which
            gradients were found to flow.
        kinds: Of the values of its placeholders, once it has run.
        finished: What becomes of the program in which something rests before it runs.
    """

    traced: TracedModule
    schedule: Schedule
    graph: Graph
    steps: tuple[Step, ...]
    made: tuple[int, ...]
    left: tuple[int, ...]
    returned: tuple[int, ...]
    num_slots: int
    fetched: tuple[tuple[int, Any], ...]
    constants: tuple[tuple[Run, int], ...]
    forward: tuple[Instruction, ...]
    stretches: tuple[Stretch | Instruction, ...]
    backwards: tuple[int, ...]
    before: tuple[tuple[Part, ...], ...]
    busy: tuple[int, ...]
    recomputes: tuple[bool, ...]
    place: tuple[int, ...]
    released: tuple[frozenset[int], ...]
    hooked: frozenset[int]
    revived: frozenset[int]
    result: Any
    rests: Rests
    variants: list[Program]
    copied: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    learned: dict[int, Places] = field(default_factory=dict[int, Places])
    differentiable: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    kinds: list[Kinds] = field(default_factory=list[Kinds])
    finished: Callable[[Program], Program] = lambda program: program

    def use_hooks(self) -> None:
        """Lets nothing rest in further calls."""
        del self.variants[1:]
        self.variants.extend(self.variants[:1])


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
    program = _compiled(traced, schedule, graph, Rests(), [])
    program.variants.append(program)
    program.copied.update(known_changes(program))
    return program


def with_rests(program: Program, rests: Rests) -> Program:
    """The same program, in which something rests; where saved tensors belong it learns anew, with fewer hooks."""
    found = _compiled(program.traced, program.schedule, program.graph, rests, program.variants)
    return program.finished(replace(found, copied=program.copied, kinds=program.kinds))


def _compiled(traced: TracedModule, schedule: Schedule, graph: Graph, rests: Rests, variants: list[Program]) -> Program:
    order = Order.of(traced, schedule)
    slot_of = slots(traced)
    hooked = hooked_operations(schedule, graph, order) - rests.operations - traced.dead_ends
    after = constants_after(traced, order.first_runs)
    lines = instructions_of(traced, schedule, graph, hooked, order, after, rests.filled)
    runs_again = [{n for what, n in before if what is Do.RUN_AGAIN} for before in lines.before]
    announced = {n for n, again in zip(order.backwards, runs_again, strict=True) if again} | rests.told
    forward = tuple((Do.REST if what is Do.DROP and n in rests.tensors else what, n) for what, n in lines.forward)
    constants = tuple((compile_constant(c, slot_of), slot_of[c]) for c in traced.constants)
    runs = Counter(n for kind, n in schedule if kind == "F")
    taped, passing = _discarded_tapes(schedule), _passing_tapes(forward)
    steps = tuple(
        _step(
            traced,
            n,
            slot_of,
            is_hooked=n in hooked,
            is_announced=n in announced,
            is_repeated=runs[n] > 1,
            is_taped=n in taped,
            keeps_tape=n not in passing,
        )
        for n in range(len(traced.operations))
    )
    stretches = Stretches(traced, slot_of, rests)
    again = {
        n for n, step in enumerate(steps) if step.is_plain_again and not any(steps[m].is_output for m in step.producers)
    }
    attended = frozenset(n for n in again if steps[n].is_attended_again)
    indifferent = indifferent_operations(traced, {n for n, count in runs.items() if count > 1}, again, attended)
    gathered = _gathered(lines.before, [n in hooked or n in announced for n in order.backwards])
    before = tuple(
        stretches.of_backward(instructions, again, attended, lambda n: steps[n].external, hooked, indifferent)
        for instructions in gathered
    )
    return Program(
        traced,
        schedule,
        graph,
        steps,
        tuple(slot for step in steps for slot in step.outputs),
        tuple(_left(forward)),
        tuple(slot for step in steps if step.is_output for slot in step.outputs),
        len(slot_of) + len(rests.tensors),
        tuple((slot_of[n], value) for n, value in traced.fetched().items()),
        constants,
        forward,
        stretches.of_forward(
            forward,
            {n for n, step in enumerate(steps) if step.is_plain},
            {n for n, step in enumerate(steps) if step.is_attended},
        ),
        order.backwards,
        before,
        (*(place for place, parts in enumerate(before) if parts), len(before)),
        tuple(any(map(needs_gradients, parts)) for parts in before),
        order.place,
        lines.released,
        hooked,
        order.revived,
        map_arg(traced.output_node.args[0], lambda n: cast(Any, SlotOf(slot_of[n]))),
        rests,
        variants,
    )


def checked_program(ways: Iterable[TracedModule], plan: Plan) -> Program:
    """The program of a plan, after checking for which operations it was made.

    Args:
        ways: The module's operations, in each of the ways in which they may run.
        plan: For one of them.

    Raises:
        MismatchError: The plan is for another module.
    """
    planned = [node.name for node in plan.graph.nodes]
    own: list[str] | None = None
    for traced in ways:
        names = [operation.name for operation in traced.operations]
        if names == planned:
            return compile_schedule(traced, plan.schedule, plan.graph)
        own = own or names
    assert own is not None, "operations of a module"
    difference = next((a for a, b in zip(planned, own, strict=False) if a != b), "the number of operations")
    raise MismatchError(
        f"the plan has {len(planned)} operations and the module {len(own)}; the first difference is {difference!r}. "
        "Remedy: make the plan on this module"
    )


def _discarded_tapes(schedule: Schedule) -> set[int]:
    """The operations of which a recomputation has to bring the tape, too: it goes before their backward."""
    done: set[int] = set()
    found: set[int] = set()
    for kind, n in schedule:
        if kind == "B":
            done.add(n)
        elif kind == "T" and n not in done:
            found.add(n)
    return found


def _passing_tapes(forward: Iterable[Instruction]) -> set[int]:
    """The operations whose tapes are discarded before anything else has run."""
    found: set[int] = set()
    last = -1
    for what, n in forward:
        if what in (Do.RUN, Do.RUN_AGAIN, Do.COMPUTE):
            last = n if what is Do.RUN else -1
        elif what is Do.DROP_TAPE and n == last:
            found.add(n)
    return found


def _left(forward: Iterable[Instruction]) -> list[int]:
    """The operations whose outputs are in the table at the end."""
    found: dict[int, None] = {}
    for what, n in forward:
        if what is Do.RUN or what is Do.RUN_AGAIN:
            found[n] = None
        elif what in (Do.DROP, Do.SLEEP, Do.REST):
            found.pop(n, None)
    return list(found)


def _gathered(before: Sequence[tuple[Instruction, ...]], tells: Sequence[bool]) -> tuple[tuple[Instruction, ...], ...]:
    """What happens before backwards of which nobody hears happens before the next one that tells."""
    found: list[tuple[Instruction, ...]] = []
    waiting: tuple[Instruction, ...] = ()
    for instructions, does_tell in zip(before, tells, strict=True):
        waiting += instructions
        found.append(waiting if does_tell else ())
        waiting = () if does_tell else waiting
    return tuple(found)


def _step(
    traced: TracedModule,
    n: int,
    slot_of: dict[fx.Node, int],
    *,
    is_hooked: bool,
    is_announced: bool,
    is_repeated: bool,
    is_taped: bool,
    keeps_tape: bool,
) -> Step:
    operation = traced.operations[n]
    own = [p for p in operation.parts if p not in operation.effects]
    read = tuple(dict.fromkeys(i for p in own for i in p.all_input_nodes if i not in operation.parts))
    made = [i for i in read if i in traced.producer]
    # Effects that others read live in the storage of what they write.
    written = traced.written | {i for i in read if any(i in o.effects for o in traced.operations)}
    external = [i for i in read if i.op == "placeholder" or i in written]
    kept = tuple(slot_of[i] for i in external if i in written and i not in only_written(operation))
    effects = tuple(slot_of[p] for p in effect_outputs(operation))
    is_output = n in traced.outputs
    contexts = common_contexts(operation.parts)
    return Step(
        operation,
        compile_operation(operation, slot_of, is_first=True),
        compile_operation(operation, slot_of, is_first=False),
        tuple(slot_of[p] for p in operation.outputs),
        effects,
        tuple(slot_of[i] for i in made),
        tuple(traced.producer[i] for i in made),
        tuple(slot_of[i] for i in external if i not in written),
        kept,
        is_hooked,
        is_announced,
        is_output,
        is_repeated,
        is_taped,
        keeps_tape,
        contexts,
        not (is_output or kept or effects or contexts),
        is_hooked or is_announced or operation.is_random,
        not (is_output or kept or contexts),
        is_taped or operation.is_random,
        bool(external),
        any(map(may_keep_what_it_reads, operation.parts)),
    )
