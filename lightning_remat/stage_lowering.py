"""A chain sequence becomes a schedule of the graph: only what is used is run again, and nothing outlives its use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from .chain import ChainSequence
from .compiled import Small, njit
from .graph import Graph
from .graph_arrays import BACKWARD, DISCARD, DISCARD_TAPE, RUN, GraphArrays, graph_arrays
from .lowering import missing, with_liveness
from .schedule import Schedule
from .stages import GraphStage

_Event: TypeAlias = tuple[int, int, int]
"""An action as a number, and the residencies (of an output, of a tape) that it begins or ends; -1 for none."""


@dataclass(slots=True)
class _Memory:
    """What is resident while a sequence is written out, as the number of each residency."""

    outputs: dict[int, int] = field(default_factory=dict[int, int])
    tapes: dict[int, int] = field(default_factory=dict[int, int])
    num_residencies: int = 0

    def begin(self) -> int:
        self.num_residencies += 1
        return self.num_residencies - 1


def lower_sequence(graph: Graph, stages: tuple[GraphStage, ...], sequence: ChainSequence) -> Schedule:
    """The schedule of `sequence`, cheaper than it where a stage need not run as a whole.

    `Fn`, `Fck` and `Fall` run the nodes of a stage whose values are not resident, and leave what they are to keep;
    runs that turn out to serve nothing are then left out, and every value goes after its last use.

    Args:
        graph: The operations.
        stages: Its stages, as `cut_stages` gives them.
        sequence: A valid sequence of as many stages.

    Returns:
        A valid schedule.
    """
    events: list[_Event] = []
    memory = _Memory()
    kept_inputs: set[int] = set()  # stages (from 1) whose input is kept as such
    kept_tapes: set[int] = set()
    # The caller holds the graph's outputs until their own backward: to drop one and make it again costs a second copy.
    held = set(graph.outputs)
    has_run: set[int] = set()
    for position, (kind, number) in enumerate(sequence):
        stage = stages[number - 1]
        follows = sequence.operations[position + 1 : position + 2]
        if kind == "Fall" and number in has_run and follows and follows[0].kind == "B":
            # A recomputation for the backward that follows: each node right before the backward that reads it.
            continue
        has_run.add(number)
        if kind == "B":
            _run_backward(graph, stage, memory, events)
            kept_tapes.discard(number)
            kept_inputs.discard(number)
            held.difference_update(stage.nodes)
            # The input that was kept for this backward may be what the next one reads of its stage's values.
            if follows and follows[0] == ("Fall", number - 1) and stages[number - 2].reuses_exit:
                _discard(stage, memory, events, frozenset(), keeps_tapes=False)
                continue
        else:
            _run(graph, stage, memory, events, with_tapes=kind == "Fall")
            if kind == "Fn":
                kept_inputs.discard(number)
            if kind == "Fall":
                kept_tapes.add(number)
            else:
                kept_inputs.add(number + 1)
        # A stage's values last as long as its tape or the next stage's input is kept.
        for k in {number - 1, number} - {0}:
            wanted = stages[k - 1].kept if k in kept_tapes else frozenset[int]()
            if k + 1 in kept_inputs:
                wanted |= frozenset(stages[k - 1].exit)
            wanted |= held.intersection(stages[k - 1].nodes)
            _discard(stages[k - 1], memory, events, wanted, keeps_tapes=k in kept_tapes)
    return with_liveness(graph, _without_waste(graph_arrays(graph), np.array(events, np.int32)))


def _run(graph: Graph, stage: GraphStage, memory: _Memory, events: list[_Event], *, with_tapes: bool) -> None:
    for n in stage.nodes:
        lacks_tape = bool(graph.nodes[n].tape_bytes) and n not in memory.tapes
        if n not in memory.outputs or (lacks_tape and with_tapes):
            _run_node(graph, n, memory, events)


def _run_backward(graph: Graph, stage: GraphStage, memory: _Memory, events: list[_Event]) -> None:
    for n in reversed(stage.nodes):
        for m in missing(graph, n, memory.outputs, memory.tapes):
            _run_node(graph, m, memory, events)
        events.append((4 * n + BACKWARD, -1, -1))


def _run_node(graph: Graph, n: int, memory: _Memory, events: list[_Event]) -> None:
    output = tape = -1
    if n not in memory.outputs:
        output = memory.outputs[n] = memory.begin()
    if graph.nodes[n].tape_bytes and n not in memory.tapes:
        tape = memory.tapes[n] = memory.begin()
    events.append((4 * n + RUN, output, tape))


def _discard(
    stage: GraphStage, memory: _Memory, events: list[_Event], wanted: frozenset[int], *, keeps_tapes: bool
) -> None:
    for n in stage.nodes:
        if n in memory.outputs and n not in wanted:
            events.append((4 * n + DISCARD, memory.outputs.pop(n), -1))
        if n in memory.tapes and not keeps_tapes:
            events.append((4 * n + DISCARD_TAPE, -1, memory.tapes.pop(n)))


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
