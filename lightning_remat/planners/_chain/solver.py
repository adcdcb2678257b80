"""What the chain planners share: a problem, its makespan table under a budget, and the sequence at a budget."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...chain import Chain, ChainSequence, Operation, memory_usages
from ...errors import InfeasibleBudgetError
from .backtrack import Table, no_choices, walk
from .fronts import fill_fronts
from .problem import Problem, build, keep_all_memory
from .recurrence import least_memory, whole_row
from .slots import fill_slots
from .steps import Steps, to_sequence

_NO_LIMIT = 1 << 60


def solve_chain(
    chain: Chain, budget: float, *, slots: int | None, keeps_tapes: bool, floating: bool, family: str
) -> ChainSequence:
    """A fastest sequence of a family within `budget`; the solvers of `rotor` and `griewank` differ by flags alone.

    Args:
        chain: The chain.
        budget: Memory in the chain's unit.
        slots: Slots that the budget is divided into; None plans in exact memory.
        keeps_tapes: Whether tapes may be kept for later.
        floating: Whether activations may be replaced before their backward's turn.
        family: The sequences searched, for the error.

    Raises:
        InfeasibleBudgetError: No sequence of the family fits; `minimum_bytes` is the least budget for which one does.
        ValueError: `slots` is not positive.
    """
    if slots is not None and slots < 1:
        raise ValueError(f"slots is {slots}: pass a positive number, or None to plan in exact memory")
    p, scale = build(chain, keeps_tapes=keeps_tapes, floating=floating)
    fixed = int(p.costs.output[0])
    if budget == float("inf") or (memory := scale.from_chain(budget) - fixed) >= keep_all_memory(p):
        return keep_all_sequence(p)
    least = int(least_memory(p)[whole_row(p)])
    if memory < least:
        minimum = scale.to_chain(least + fixed)
        sequence = sequence_at(p, front_table(p, least, 1), least)
        peak_at = sequence.operations[int(np.argmax(memory_usages(chain, sequence)))]
        raise InfeasibleBudgetError(
            f"no {family} sequence of these {p.num_stages} stages fits in {budget:g}: the least budget is {minimum!r},"
            f" set by {peak_at}; raise the budget, or cut the chain into smaller stages",
            minimum_bytes=minimum,
            budget_bytes=budget,
            node=str(peak_at),
        )
    if slots is None:
        return sequence_at(p, front_table(p, memory, _NO_LIMIT), memory)
    table, available = slot_table(p, memory, slots)
    if np.isfinite(table.uniform[whole_row(p), available]):
        return sequence_at(p, table, available)
    # Just above the least memory the slots' rounding leaves nothing, and exact memory has few states.
    return sequence_at(p, front_table(p, memory, slots), memory)


def keep_all_sequence(p: Problem) -> ChainSequence:
    """The sequence that keeps every tape, or every input where tapes may not be kept."""
    stages = range(1, p.num_stages + 1)
    if p.keeps_tapes:
        return ChainSequence((*(Operation("Fall", s) for s in stages), *(Operation("B", s) for s in reversed(stages))))
    forward = (Operation("Fck", s) for s in stages[:-1])
    backward = (Operation(kind, s) for s in reversed(stages) for kind in ("Fall", "B"))
    return ChainSequence((*forward, *backward))


def slot_table(p: Problem, memory: int, slots: int) -> tuple[Table, int]:
    """The makespans up to `memory` in uniform slots, and how many slots `memory` holds (rounded down)."""
    slot = max(1, -(-memory // slots))
    available = memory // slot
    uniform = fill_slots(p, slot, available)
    nothing = np.empty(0, dtype=np.int64)
    return Table(slot, uniform, nothing, np.empty(0), np.empty((0, 2), dtype=np.int64)), available


def front_table(p: Problem, memory: int, limit: int) -> Table:
    """The makespans up to `memory` as step functions of at most `limit` steps."""
    memories, makespans, bounds = fill_fronts(p, memory, limit)
    return Table(1, np.empty((0, 0)), memories, makespans, bounds)


def sequence_at(p: Problem, table: Table, available: int) -> ChainSequence:
    """The sequence that has the table's makespan for the whole chain with `available` slots."""
    return to_sequence(steps_at(p, table, [available])[0])


def steps_at(p: Problem, table: Table, available: Iterable[int]) -> tuple[Steps, ...]:
    """The same as arrays, for several numbers of slots."""
    choices = no_choices()
    walks = (walk(p, table, slots, choices) for slots in available)
    return tuple(Steps(kinds.astype(np.int8), stages.astype(np.int32)) for kinds, stages in walks)
