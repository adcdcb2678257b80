"""Compiles a schedule into the program that the executor follows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import fx
from torch.fx.node import map_arg

from ..errors import MismatchError
from ..operations.contexts import common_contexts
from ..operations.evaluation import compile_constant, compile_operation, effect_outputs, only_written, slots
from ..operations.functions import may_keep_what_it_reads
from ..operations.indifferent import is_indifferent
from ..operations.leaves import Differentiable
from ..operations.operation import TracedModule
from ..operations.synchronized import shares_statistics
from ..plans.plan import Plan
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from .instructions import Do, Instruction, Order, constants_after, hooked_operations, instructions_of
from .modified import known_changes
from .program import Program, SlotOf, Step
from .resting import Rests
from .stretches import LetGo, Stretches


def compile_schedule(traced: TracedModule, schedule: Schedule, graph: Graph) -> Program:
    """The program of a valid schedule.

    Args:
        traced: The operations.
        schedule: Valid on the graph, as `simulate` judges.
        graph: The profile of these operations: what each backward reads.

    Raises:
        ScheduleError: Backwards are not in autograd's order, the reverse of that of the first runs.
    """
    program = _compiled(traced, schedule, graph, Rests(), {}, [])
    program.variants.append(program)
    program.copied.update(known_changes(program))
    return program


def with_rests(program: Program, rests: Rests) -> Program:
    """The same program, in which something rests; where saved tensors belong it learns anew, with fewer hooks."""
    traced, schedule, graph = program.traced, program.schedule, program.graph
    found = _compiled(traced, schedule, graph, rests, program.differentiable, program.variants)
    return program.finished(replace(found, copied=program.copied, suspected=program.suspected, kinds=program.kinds))


def _compiled(
    traced: TracedModule,
    schedule: Schedule,
    graph: Graph,
    rests: Rests,
    differentiable: dict[int, tuple[Differentiable, ...]],
    variants: list[Program],
) -> Program:
    order = Order.of(traced, schedule)
    slot_of = slots(traced)
    hooked = hooked_operations(schedule, graph, order) - rests.operations - traced.dead_ends
    after = constants_after(traced, order.first_runs)
    lines = instructions_of(traced, schedule, graph, hooked, order, after, rests.filled, rests.tapes)
    runs_again = [{n for what, n in before if what is Do.RUN_AGAIN} for before in lines.before]
    announced = {n for n, again in zip(order.backwards, runs_again, strict=True) if again} | rests.told
    forward = tuple((Do.REST if what is Do.DROP and n in rests.tensors else what, n) for what, n in lines.forward)
    constants = tuple((compile_constant(c, slot_of), slot_of[c]) for c in traced.constants)
    runs = schedule.runs()
    settled = _settled(traced)
    buffers = _buffers(traced)
    taped, passing = _discarded_tapes(schedule), _passing_tapes(forward)
    steps = tuple(
        _step(
            traced,
            n,
            slot_of,
            settled[n] - buffers if runs[n] > 1 else settled[n],
            is_hooked=n in hooked,
            is_announced=n in announced,
            is_repeated=runs[n] > 1,
            is_taped=n in taped,
            keeps_tape=n not in passing,
        )
        for n in range(len(traced.operations))
    )
    stretches = Stretches(traced, slot_of, rests, differentiable)
    again = {n for n, step in enumerate(steps) if step.is_plain_again}
    seen = tuple(slot for n in _seen(traced) for slot in steps[n].outputs)
    attended = frozenset(again & taped - rests.tapes.keys())  # of a tape that rests nothing is caught
    drawing = frozenset(n for n in again - attended if steps[n].operation.is_random)
    recorded = frozenset(n for n in again if steps[n].is_recorded_again)
    gathered = _gathered(lines.before, [n in hooked or n in announced for n in order.backwards])
    before = tuple(
        stretches.of_backward(
            instructions,
            again,
            lambda n: steps[n].external,
            frozenset(seen),
            hooked,
            attended=attended,
            drawing=drawing,
            recorded=recorded,
        )
        for instructions in gathered
    )
    return Program(
        traced=traced,
        schedule=schedule,
        graph=graph,
        steps=steps,
        made=tuple(slot for step in steps for slot in step.outputs),
        left=tuple(_left(forward)),
        seen=seen,
        num_slots=len(slot_of) + len(rests.tensors) + len(rests.tapes),
        fetched=tuple((slot_of[n], value) for n, value in traced.fetched().items()),
        constants=constants,
        forward=forward,
        stretches=stretches.of_forward(
            forward,
            {n for n, step in enumerate(steps) if step.is_plain},
            hooked | announced,
            {n for n, step in enumerate(steps) if step.operation.is_random} - hooked - announced,
        ),
        backwards=order.backwards,
        before=before,
        busy=(*(place for place, parts in enumerate(before) if parts), len(before)),
        recomputes=tuple(not all(isinstance(part, LetGo) for part in parts) for parts in before),
        place=order.place,
        released=lines.released,
        hooked=hooked,
        revived=order.revived,
        settled=tuple({slot_of[i] for found in settled for i in found}),
        result=map_arg(traced.output_node.args[0], lambda n: cast(Any, SlotOf(slot_of[n]))),
        rests=rests,
        variants=variants,
        differentiable=differentiable,
    )


def _seen(traced: TracedModule) -> list[int]:
    """The operations whose outputs live where others may write: in what comes in, or in what is returned."""
    homes = [operation.lives_in.union(operation.outputs) for operation in traced.operations]
    open_to_others = {i for n in traced.outputs for i in homes[n]}.union(traced.placeholders)
    return [n for n, home in enumerate(homes) if not home.isdisjoint(open_to_others)]


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


def _settled(traced: TracedModule) -> list[frozenset[fx.Node]]:
    """For each operation, what it reads outside that was written before, and is as it reads it from then on."""
    place = {part: k for k, part in enumerate(part for o in traced.operations for part in o.parts)}
    last = {i: place[n] for i, n in traced.written.items()}
    found: list[frozenset[fx.Node]] = []
    for operation in traced.operations:
        reads = [part for part in operation.parts if part not in operation.effects]
        unsettled = {*operation.writes, *(i for p in reads for i in p.all_input_nodes if last.get(i, -1) >= place[p])}
        found.append(frozenset(last.keys() & {i for p in reads for i in p.all_input_nodes} - unsettled))
    return found


def _buffers(traced: TracedModule) -> set[fx.Node]:
    """What the module holds that is no parameter: what a forward writes there, the next one may before a backward."""
    parameters = {name for name, _ in traced.module.named_parameters(remove_duplicate=False)}
    return {i for i, name in traced.owned.items() if name not in parameters}


def _step(
    traced: TracedModule,
    n: int,
    slot_of: dict[fx.Node, int],
    settled: frozenset[fx.Node],
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
    # Effects that others read live in the storage of what they write, which statistics that are shared do not.
    effects = {i for i in read if any(i in o.effects for o in traced.operations)}
    written = (traced.written.keys() - settled).union(i for i in effects if not shares_statistics(i))
    external = [i for i in read if i.op == "placeholder" or i in written]
    kept = tuple(slot_of[i] for i in external if i in written and i not in only_written(operation))
    own_effects = tuple(slot_of[p] for p in effect_outputs(operation))
    is_output = n in traced.outputs
    contexts = common_contexts(operation.parts)
    return Step(
        operation=operation,
        run=compile_operation(operation, slot_of, is_first=True),
        run_again=compile_operation(operation, slot_of, is_first=False),
        outputs=tuple(slot_of[p] for p in operation.outputs),
        effects=own_effects,
        inputs=tuple(slot_of[i] for i in made),
        producers=tuple(traced.producer[i] for i in made),
        external=tuple(slot_of[i] for i in external if i not in written),
        kept=kept,
        is_hooked=is_hooked,
        is_announced=is_announced,
        is_output=is_output,
        is_repeated=is_repeated,
        is_taped=is_taped,
        keeps_tape=keeps_tape,
        contexts=contexts,
        is_plain=not (is_output or kept or own_effects or contexts),
        is_plain_again=not (is_output or kept or contexts),
        is_recorded_again=is_taped or operation.is_random or not all(map(is_indifferent, operation.parts)),
        is_conditional=bool(external),
        may_keep=any(map(may_keep_what_it_reads, operation.parts)),
    )
