"""The actions of a schedule as the executor's instructions: what runs, and when the table lets go of what."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

from torch import fx

from ..errors import ScheduleError
from ..operations.operation import TracedModule
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
    REST = 6  # the table lets go of the output, and it gives up its memory, to be filled again before a backward
    FILL = 7  # what rests in the memory of the output has been made again
    REST_TAPE = 8  # the tape gives up its memory, to be filled again from that of a recomputation


Instruction = tuple[Do, int]


@dataclass(frozen=True, slots=True)
class Order:
    """What a schedule says about first runs and backwards."""

    first_runs: tuple[int, ...]
    backwards: tuple[int, ...]
    place: tuple[int, ...]
    revived: frozenset[int]
    split: int  # the first action that belongs to the backward: the loss stands before it

    @classmethod
    def of(cls, traced: TracedModule, schedule: Schedule) -> Order:
        """That of a schedule.

        Raises:
            ScheduleError: Backwards are not in autograd's order.
        """
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


def hooked_operations(
    schedule: Schedule,
    graph: Graph,
    order: Order,
    resting: Collection[int] = frozenset(),
    resting_tapes: Collection[int] = frozenset(),
) -> frozenset[int]:
    """The operations whose saved values are not all there, without a gap, from the first run to the backward.

    A value may be gone before the run that saves it: what reads an item of a tuple saves the tuple's memory. Where
    outputs are put to sleep, a view is emptied with its base, and with it what saved the view.

    Args:
        schedule: What is discarded, and when.
        graph: What each backward reads.
        order: That of the schedule.
        resting: Outputs that may go without hooks where autograd holds them as they are, see `resting.rests_of`.
        resting_tapes: The operations whose tapes may.
    """
    there: set[int] = set()
    has_run: set[int] = set()
    done: set[int] = set()
    found: set[int] = set()
    saved = [{i for i in node.saved if i not in resting or i not in node.held} for node in graph.nodes]
    readers: dict[int, list[int]] = {}
    for n, read in enumerate(saved):
        for j in read:
            readers.setdefault(j, []).append(n)
    for position, (kind, n) in enumerate(schedule):
        if kind == "F":
            there.add(n)
            if n not in has_run and not there.issuperset(saved[n]):
                found.add(n)
            has_run.add(n)
        elif kind == "B":
            done.add(n)
        elif kind == "T" and n not in done:
            found |= {n} - frozenset(resting_tapes)
        elif kind == "D":
            there.discard(n)
            sleeps = bool(order.revived) and position < order.split
            gone = graph.roots[n] if sleeps else n
            found.update(m for m in readers.get(gone, ()) if m in has_run and m not in done)
    return frozenset(found)


@dataclass(slots=True)
class Lines:
    """The instructions of a forward, and those before each backward; what the table lets go of after each."""

    forward: tuple[Instruction, ...]
    before: tuple[tuple[Instruction, ...], ...]
    released: tuple[frozenset[int], ...]


def made_again(schedule: Schedule) -> dict[int, tuple[int, int]]:
    """For each output that is, the last action that makes it after it was discarded, and how many backwards ran."""
    found: dict[int, tuple[int, int]] = {}
    gone: set[int] = set()
    place = 0
    for position, (kind, n) in enumerate(schedule):
        if kind == "B":
            place += 1
        elif kind == "D":
            gone.add(n)
        elif kind == "F" and n in gone:
            gone.remove(n)
            found[n] = position, place
    return found


def instructions_of(
    traced: TracedModule,
    schedule: Schedule,
    graph: Graph,
    hooked: frozenset[int],
    order: Order,
    after: dict[int, list[int]],
    filled: Collection[int] = frozenset(),
    resting_tapes: Collection[int] = frozenset(),
) -> Lines:
    """The actions as instructions; the table holds an output from its run to the last time that something reads it.

    That is a run of another operation, or the backward of a hooked one; others hold what they read themselves.

    Args:
        traced: The operations.
        schedule: A valid one.
        graph: What each backward reads.
        hooked: The operations of which autograd gets references.
        order: That of the schedule.
        after: The constants that become known with each operation.
        filled: The operations by whose outputs something is filled that rests.
        resting_tapes: The operations whose tapes rest from their first runs on.
    """
    actions = list(schedule)
    filling = {position for n, (position, _) in made_again(schedule).items() if n in filled}
    drops, released = _last_reads(traced, actions, graph, hooked, order)
    forward: list[Instruction] = [(Do.COMPUTE, c) for c in after.get(-1, ())]
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
                into += [(Do.FILL, n)] if position in filling else []
            else:
                has_run.add(n)
                into.append((Do.RUN, n))
                into += [(Do.REST_TAPE, n)] if n in resting_tapes else []  # while its output is at hand
                into += [(Do.COMPUTE, c) for c in after.get(n, ())]
        elif kind == "T":
            into += [(Do.DROP_TAPE, n)] if n in hooked else []  # others hold their tapes themselves
        elif order.revived and position < order.split:
            into.append((Do.SLEEP, n))
        into += [(Do.DROP, j) for j in drops.get(position, ())]
    place_of = {n: frozenset(found) for n, found in released.items()}
    return Lines(
        tuple(forward),
        tuple(map(tuple, before)),
        tuple(place_of.get(n, frozenset()) for n in range(len(traced.operations))),
    )


def _last_reads(
    traced: TracedModule, actions: Sequence[Action], graph: Graph, hooked: frozenset[int], order: Order
) -> tuple[dict[int, list[int]], dict[int, set[int]]]:
    """Where the table lets go of each output: position of a run → outputs; hooked operation → outputs.

    What is put to sleep stays until then.
    """
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
        elif kind == "D" and order.revived and position < order.split:
            last.pop(n, None)
        elif kind == "D":
            settle(n)
    for n in list(last):
        settle(n)
    return drops, released


def _constant_inputs(traced: TracedModule) -> dict[int, list[int]]:
    """For each operation, those whose values the constants read that are computed right after its first run."""
    after = constants_after(traced, range(len(traced.operations)))
    return {
        n: [traced.producer[i] for c in found for i in traced.constants[c].all_input_nodes if i in traced.producer]
        for n, found in after.items()
        if n >= 0
    }


def constants_after(traced: TracedModule, order: Sequence[int]) -> dict[int, list[int]]:
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
