"""A chain sequence becomes a schedule of the graph: only what is used is run again, and nothing outlives its use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .chain import ChainSequence
from .graph import Graph
from .lowering import apply_liveness, missing
from .schedule import Action, Schedule
from .stages import GraphStage


class _Event(NamedTuple):
    """An action, and the residency (of an output, of a tape) that it begins or ends; -1 for none."""

    action: Action
    output: int = -1
    tape: int = -1


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
    return apply_liveness(graph, Schedule(tuple(e.action for e in _without_waste(graph, events))))


def _run(graph: Graph, stage: GraphStage, memory: _Memory, events: list[_Event], *, with_tapes: bool) -> None:
    for n in stage.nodes:
        lacks_tape = bool(graph.nodes[n].tape_bytes) and n not in memory.tapes
        if n not in memory.outputs or (lacks_tape and with_tapes):
            _run_node(graph, n, memory, events)


def _run_backward(graph: Graph, stage: GraphStage, memory: _Memory, events: list[_Event]) -> None:
    for n in reversed(stage.nodes):
        for m in missing(graph, n, memory.outputs, memory.tapes):
            _run_node(graph, m, memory, events)
        events.append(_Event(Action("B", n)))


def _run_node(graph: Graph, n: int, memory: _Memory, events: list[_Event]) -> None:
    output = tape = -1
    if n not in memory.outputs:
        output = memory.outputs[n] = memory.begin()
    if graph.nodes[n].tape_bytes and n not in memory.tapes:
        tape = memory.tapes[n] = memory.begin()
    events.append(_Event(Action("F", n), output, tape))


def _discard(
    stage: GraphStage, memory: _Memory, events: list[_Event], wanted: frozenset[int], *, keeps_tapes: bool
) -> None:
    for n in stage.nodes:
        if n in memory.outputs and n not in wanted:
            events.append(_Event(Action("D", n), output=memory.outputs.pop(n)))
        if n in memory.tapes and not keeps_tapes:
            events.append(_Event(Action("T", n), tape=memory.tapes.pop(n)))


def _without_waste(graph: Graph, events: list[_Event]) -> list[_Event]:
    """The events without the recomputations that nothing reads, and without the discards of what those made."""
    first_run: dict[int, int] = {}
    for position, event in enumerate(events):
        if event.action.kind == "F":
            first_run.setdefault(event.action.node, position)
    # Backwards through the events: the residency of each node that is current there, and those that are read.
    outputs: dict[int, int] = {}
    tapes: dict[int, int] = {}
    used: set[int] = set()
    dropped: set[int] = set()
    kept: list[_Event] = []
    for position in range(len(events) - 1, -1, -1):
        event = events[position]
        kind, n = event.action
        if kind == "D":
            outputs[n] = event.output
        elif kind == "T":
            tapes[n] = event.tape
        elif kind == "B":
            used.update(outputs[i] for i in graph.nodes[n].saved)
            if graph.nodes[n].tape_bytes:
                used.add(tapes[n])
        else:
            made = {event.output, event.tape} - {-1}
            if first_run[n] != position and not made & used:
                dropped |= made
                continue
            used.update(outputs[i] for i in graph.reads[n])
        kept.append(event)
    kept.reverse()
    return [e for e in kept if e.action.kind in "FB" or not {e.output, e.tape} & dropped]
