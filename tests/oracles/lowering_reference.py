"""Lowering as its definition reads, action by action: the reference of the compiled one."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lightning_remat import Graph, Schedule
from lightning_remat.schedules.schedule import Action


def lower_kept(graph: Graph, outputs: Collection[int], tapes: Collection[int] | None = None) -> Schedule:
    """The schedule that keeps the given values and recomputes the others at most once."""
    kept_outputs = {n for n, root in enumerate(graph.roots) if n in outputs or root in outputs}
    kept_tapes = set(kept_outputs if tapes is None else tapes)
    actions = [Action("F", n) for n in range(len(graph.nodes))]
    resident_outputs = set(range(len(graph.nodes)))
    resident_tapes = {n for n, node in enumerate(graph.nodes) if node.tape_bytes}
    # What the forward drops is dropped before the first backward; liveness moves it to the last use.
    for n in sorted(resident_outputs - kept_outputs):
        actions.append(Action("D", n))
        resident_outputs.discard(n)
    for n in sorted(resident_tapes - kept_tapes):
        actions.append(Action("T", n))
        resident_tapes.discard(n)
    for n in reversed(range(len(graph.nodes))):
        for m in _missing(graph, n, resident_outputs, resident_tapes):
            actions.append(Action("F", m))
            resident_outputs.add(m)
            if graph.nodes[m].tape_bytes:
                resident_tapes.add(m)
        actions.append(Action("B", n))
    actions += [Action("D", n) for n in sorted(resident_outputs)]
    actions += [Action("T", n) for n in sorted(resident_tapes)]
    return apply_liveness(graph, Schedule(tuple(actions)))


def _missing(graph: Graph, n: int, outputs: Collection[int], tapes: Collection[int]) -> list[int]:
    """The nodes to run before the backward of `n`, in order, when `outputs` and `tapes` are resident."""
    needed = {i for i in graph.nodes[n].saved if i not in outputs}
    if graph.nodes[n].tape_bytes and n not in tapes:
        needed.add(n)
    while more := {i for m in needed for i in graph.reads[m] if i not in outputs} - needed:
        needed |= more
    return sorted(needed)


def apply_liveness(graph: Graph, schedule: Schedule) -> Schedule:
    """The same schedule with each discard moved to right after the last use of what it discards."""
    last_output: dict[int, int] = {}  # node -> last position that uses the present residency of its output
    last_tape: dict[int, int] = {}
    discards: dict[int, list[Action]] = {}
    # A second copy of a storage that a view or the caller may hold costs more than to keep the first, for who reads it.
    shared = {graph.roots[n] for n, node in enumerate(graph.nodes) if node.is_view or n in graph.outputs}
    for position, action in enumerate(schedule.actions):
        kind, n = action
        if kind == "F":
            for i in graph.reads[n]:
                last_output[i] = position
            if n in last_output and not (n in shared and _is_read_later(graph, schedule, position)):
                # Brings back the tape only: what it makes again need not wait for it.
                discards.setdefault(last_output[n], []).append(Action("D", n))
            last_output[n] = position
            if graph.nodes[n].tape_bytes:
                if n in last_tape:
                    discards.setdefault(last_tape[n], []).append(Action("T", n))
                last_tape[n] = position
        elif kind == "B":
            for i in graph.nodes[n].saved:
                last_output[i] = position
            if graph.nodes[n].tape_bytes:
                last_tape[n] = position
        else:
            ends = last_output if kind == "D" else last_tape
            discards.setdefault(ends.pop(n, position), []).append(action)
    return Schedule(tuple(_interleave(schedule.actions, discards)))


def _is_read_later(graph: Graph, schedule: Schedule, position: int) -> bool:
    """Whether the output of a run is read before it is discarded."""
    n = schedule.actions[position].node
    for kind, m in schedule.actions[position + 1 :]:
        if (kind, m) == ("D", n):
            return False
        if n in (graph.reads[m] if kind == "F" else graph.nodes[m].saved if kind == "B" else ()):
            return True
    return False


def _interleave(actions: Iterable[Action], discards: dict[int, list[Action]]) -> Iterable[Action]:
    for position, action in enumerate(actions):
        if action.kind in "FB":
            yield action
        yield from discards.get(position, ())
