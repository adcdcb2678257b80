"""A chain sequence becomes a schedule of the graph: only what is used is run again, and nothing outlives its use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...lowering import discard_at_last_use
from ...schedules.arrays import BACKWARD, DISCARD, DISCARD_TAPE, RUN, GraphArrays
from ...schedules.compiled import Flags, Ints, Small, njit
from ...schedules.uses import mark_missing
from .stages import GraphStage
from .steps import BACK, FALL, FN, Steps


def lower_steps(arrays: GraphArrays, stages: StageArrays, steps: Steps) -> Small:
    """The actions, as numbers, of a valid sequence, cheaper than it where a stage need not run as a whole.

    `Fn`, `Fck` and `Fall` run the nodes of a stage whose values are not resident, and leave what they are to keep;
    runs that turn out to serve nothing are then left out, and every value goes after its last use.
    """
    events = _events(arrays, stages, steps)
    return discard_at_last_use(arrays, _without_waste(arrays, events), np.empty(0, np.int64))


class StageArrays(NamedTuple):
    """The stages of a graph as arrays."""

    start: Ints  # [stages + 1] first node of each, and the number of nodes
    is_exit: Flags  # [n] whether the next stage reads the node
    is_kept: Flags  # [n] whether its stage's tape holds the node's output
    reuses_exit: Flags  # [stages]


class _Memory(NamedTuple):
    """What is resident while a sequence is written out, as the number of each residency, from 1; 0 where nothing is."""

    outputs: Ints
    tapes: Ints
    sizes: Ints  # how many events are written, and how many residencies have begun


def stage_arrays(stages: Sequence[GraphStage]) -> StageArrays:
    """The stages as arrays."""
    start = np.array([*(stage.start for stage in stages), stages[-1].stop], np.int64)
    is_exit, is_kept = np.zeros(start[-1], np.uint8), np.zeros(start[-1], np.uint8)
    for stage in stages:
        is_exit[list(stage.exit)] = 1
        is_kept[list(stage.kept)] = 1
    return StageArrays(start, is_exit, is_kept, np.array([stage.reuses_exit for stage in stages], np.uint8))


@njit
def _events(arrays: GraphArrays, stages: StageArrays, steps: Steps) -> Small:
    """Actions as numbers, each with the residencies (of an output, of a tape) that it begins or ends; -1 for none."""
    count = len(arrays.root)
    kinds, numbers = steps.kinds, steps.stages
    events = np.empty((16 * count + 64, 3), np.int32)
    memory = _Memory(np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(2, np.int64))
    keeps_input = np.zeros(len(stages.start) + 1, np.bool_)  # of the stage with that number, for its backward
    keeps_tape = np.zeros(len(stages.start) + 1, np.bool_)
    has_run = np.zeros(len(stages.start) + 1, np.bool_)
    is_needed = np.zeros(count, np.bool_)
    # The caller holds the graph's outputs until their own backward: to drop one and make it again costs a second copy.
    is_held = arrays.is_output > 0
    for position in range(len(kinds)):
        if memory.sizes[0] + 5 * count > len(events):  # an operation writes at most five events a node
            events = np.concatenate((events, np.empty_like(events)))
        kind, number = kinds[position], numbers[position]
        start, stop = stages.start[number - 1], stages.start[number]
        follows, follower = -1, -1
        if position + 1 < len(kinds):
            follows, follower = kinds[position + 1], numbers[position + 1]
        if kind == FALL and has_run[number] and follows == BACK:
            # A recomputation for the backward that follows: each node right before the backward that reads it.
            continue
        has_run[number] = True
        if kind == BACK:
            for n in range(stop - 1, start - 1, -1):
                lowest, highest = mark_missing(arrays, n, memory.outputs, memory.tapes, is_needed)
                for m in range(lowest, highest + 1):
                    if is_needed[m]:
                        _run(arrays, m, memory, events)
                        is_needed[m] = False
                _write(events, memory, 4 * n + BACKWARD, -1, -1)
                is_held[n] = False
            keeps_tape[number] = keeps_input[number] = False
            # The input that was kept for this backward may be what the next one reads of its stage's values.
            if follows == FALL and follower == number - 1 and stages.reuses_exit[number - 2]:
                for n in range(start, stop):
                    _discard_output(events, memory, n)
                    _discard_tape(events, memory, n)
                continue
        else:
            for n in range(start, stop):
                lacks_tape = arrays.tape_bytes[n] > 0 and not memory.tapes[n]
                if not memory.outputs[n] or (lacks_tape and kind == FALL):
                    _run(arrays, n, memory, events)
            if kind == FN:
                keeps_input[number] = False
            if kind == FALL:
                keeps_tape[number] = True
            else:
                keeps_input[number + 1] = True
        # A stage's values last as long as its tape or the next stage's input is kept.
        for k in range(max(1, number - 1), number + 1):
            for n in range(stages.start[k - 1], stages.start[k]):
                is_wanted = (keeps_tape[k] and stages.is_kept[n]) or (keeps_input[k + 1] and stages.is_exit[n])
                if not is_wanted and not is_held[n]:
                    _discard_output(events, memory, n)
                if not keeps_tape[k]:
                    _discard_tape(events, memory, n)
    return events[: memory.sizes[0]]


@njit
def _write(events: Small, memory: _Memory, action: int, output: int, tape: int) -> None:
    at = memory.sizes[0]
    events[at, 0], events[at, 1], events[at, 2] = action, output, tape
    memory.sizes[0] += 1


@njit
def _run(arrays: GraphArrays, n: int, memory: _Memory, events: Small) -> None:
    output, tape = -1, -1
    if not memory.outputs[n]:
        memory.sizes[1] += 1
        output = memory.outputs[n] = memory.sizes[1]
    if arrays.tape_bytes[n] > 0 and not memory.tapes[n]:
        memory.sizes[1] += 1
        tape = memory.tapes[n] = memory.sizes[1]
    _write(events, memory, 4 * n + RUN, output, tape)


@njit
def _discard_output(events: Small, memory: _Memory, n: int) -> None:
    if memory.outputs[n]:
        _write(events, memory, 4 * n + DISCARD, memory.outputs[n], -1)
        memory.outputs[n] = 0


@njit
def _discard_tape(events: Small, memory: _Memory, n: int) -> None:
    if memory.tapes[n]:
        _write(events, memory, 4 * n + DISCARD_TAPE, -1, memory.tapes[n])
        memory.tapes[n] = 0


@njit
def _without_waste(arrays: GraphArrays, events: Small) -> Small:
    """The actions without the recomputations that nothing reads, and without the discards of what those made."""
    count = len(arrays.root)
    first_run = np.full(count, -1)
    for position in range(len(events)):
        n, kind = events[position, 0] >> 2, events[position, 0] & 3
        if kind == RUN and first_run[n] < 0:
            first_run[n] = position
    # Backwards through the events: the residency of each node that is current there, and those that are read.
    outputs, tapes = np.full(count, -1), np.full(count, -1)
    is_used = np.zeros(events[:, 1:].max() + 2, np.bool_)  # the last place stands for none
    is_dropped = np.zeros_like(is_used)
    is_kept = np.ones(len(events), np.bool_)
    for position in range(len(events) - 1, -1, -1):
        code, output, tape = events[position]
        n, kind = code >> 2, code & 3
        if kind == DISCARD:
            outputs[n] = output
        elif kind == DISCARD_TAPE:
            tapes[n] = tape
        elif kind == BACKWARD:
            for k in range(arrays.saved_start[n], arrays.saved_start[n + 1]):
                is_used[outputs[arrays.saved[k]]] = True
            if arrays.tape_bytes[n] > 0:
                is_used[tapes[n]] = True
        elif first_run[n] != position and not (is_used[output] and output >= 0) and not (is_used[tape] and tape >= 0):
            is_dropped[output] = is_dropped[tape] = True
            is_kept[position] = False
        else:
            for k in range(arrays.read_start[n], arrays.read_start[n + 1]):
                is_used[outputs[arrays.read[k]]] = True
    is_dropped[-1] = False
    for position in range(len(events)):
        code, output, tape = events[position]
        if code & 3 > BACKWARD and (is_dropped[output] or is_dropped[tape]):
            is_kept[position] = False
    return events[is_kept, 0].copy()
