"""Absence windows to schedules and back; see `fast_simulator` for what a window means."""

from __future__ import annotations

from ..graph import Graph
from ..lowering import reads
from ..schedule import Action, Schedule
from .fast_simulator import IS_SHARED, NONE, NUM_WINDOWS, PINNED, Flags, Problem, Small, Work, no_windows, replay


def schedule_of(graph: Graph, problem: Problem, windows: Small, work: Work) -> Schedule:
    """The schedule that `windows` describe, every discard right after the last use."""
    _, _, num_actions = replay(problem, windows, work)
    assert num_actions, "a schedule that was accepted is not too long"
    runs: list[int] = work.action[:num_actions].tolist()
    made: list[int] = work.made[:num_actions].tolist()
    count = len(graph.nodes)
    is_shared = [bool(problem.nodes[n, IS_SHARED]) for n in range(count)]
    output, tape = [False] * count, [False] * count  # used later, seen from the end
    backwards: list[list[Action]] = []
    for at in range(num_actions - 1, -1, -1):
        a = runs[at]
        ended: list[Action] = []
        if a >= 0:
            n = a
            if not output[n]:
                ended.append(Action("D", n))
            # A run for the tape alone replaces its output, unless views or the caller live in the older one.
            output[n] = output[n] and is_shared[n] and not made[at]
            if graph.nodes[n].tape_bytes and not tape[n]:
                ended.append(Action("T", n))
            tape[n] = False
            used = reads(graph, n)
        else:
            n = -1 - a
            used = graph.nodes[n].saved
            if graph.nodes[n].tape_bytes:
                tape[n] = True
                ended.append(Action("T", n))
        for i in used:
            if not output[i]:
                output[i] = True
                ended.append(Action("D", i))
        backwards.append([Action("F" if a >= 0 else "B", n), *ended])
    return Schedule(tuple(action for actions in reversed(backwards) for action in actions))


def last_reads(graph: Graph) -> list[int]:
    """For each root the last node whose run reads its output or a view of it; itself where there is none."""
    last = list(range(len(graph.nodes)))
    for n in range(len(graph.nodes)):
        for i in reads(graph, n):
            last[graph.roots[i]] = max(last[graph.roots[i]], n)
    return last


def windows_between(graph: Graph, problem: Problem, outputs: Flags, tapes: Flags, end: int) -> Small:
    """Windows from the last use in the forward to step `end` for all that is not to be kept.

    Args:
        graph: The operations.
        problem: The graph as arrays.
        outputs: [n] whether an output is kept.
        tapes: [n] whether a tape is kept.
        end: The step at whose end a value may be held again.
    """
    windows, count = no_windows(problem), len(graph.nodes)
    for v, last in enumerate(last_reads(graph)):
        if graph.roots[v] == v and not problem.nodes[v, PINNED] and not outputs[v]:
            windows[v, 0] = last, end
        if graph.nodes[v].tape_bytes and not tapes[v]:
            windows[count + v, 0] = v, end
    return windows


def windows_of(graph: Graph, problem: Problem, schedule: Schedule) -> Small:
    """Windows that hold at the end of each step what `schedule` holds there, as far as `NUM_WINDOWS` allow.

    Recomputations move to right before the step that needs them. Where a value is absent more often than it may
    have windows, the shortest absences are given up, so that it is held longer.
    """
    count = len(graph.nodes)
    steps = 2 * count
    spans: list[list[tuple[int, int]]] = [[] for _ in range(steps)]
    since: dict[int, int] = {}  # value -> step at whose end it was absent first
    resident = [False] * steps
    has_run = [False] * count
    step = -1
    changed: set[int] = set()
    members: list[list[int]] = [[] for _ in range(count)]
    for n, root in enumerate(graph.roots):
        members[root].append(n)

    def settle() -> None:
        for v in {graph.roots[v] if v < count else v for v in changed}:
            if resident[v] or (v < count and any(resident[m] for m in members[v])):
                if v in since:
                    spans[v].append((since.pop(v), step))
            else:
                since.setdefault(v, step)
        changed.clear()

    is_settled = True
    for kind, n in schedule.actions:
        if kind in "FB":
            if not is_settled:  # the first run after a step's own action belongs to the next step
                settle()
                is_settled = True
            if kind == "B" or not has_run[n]:
                step += 1
                is_settled = False
                has_run[n] = True
        if kind == "F":
            resident[n] = resident[count + n] = True
            changed.update((n, count + n))
        elif kind == "D":
            resident[n] = False
            changed.add(n)
        elif kind == "T":
            resident[count + n] = False
            changed.add(count + n)
    for v, start in since.items():
        spans[v].append((start, steps))
    windows = no_windows(problem)
    for v in range(steps):
        if v < count and graph.roots[v] != v:
            continue
        if (v < count and problem.nodes[v, PINNED]) or (v >= count and not graph.nodes[v - count].tape_bytes):
            continue
        longest = sorted(spans[v], key=lambda s: s[0] - s[1])[:NUM_WINDOWS]
        for k, (start, end) in enumerate(sorted(longest)):
            windows[v, k] = start, end if end < steps else NONE
    return windows
