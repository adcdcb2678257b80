"""Who reads what: the readers of every value, and the runs without which a value is not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from .arrays import GraphArrays
from .compiled import Flags, Ints, njit
from .graph import Graph
from .schedule import Schedule


def readers(graph: Graph) -> list[list[int]]:
    """For each node those whose run reads its output, ascending; a view of it is one of them."""
    return _inverted(graph.reads)


def storage_readers(graph: Graph) -> list[list[int]]:
    """For each node that owns its storage those whose run reads its output or a view of it, ascending."""
    return _inverted([graph.roots[i] for i in read] for read in graph.reads)


def last_reads(graph: Graph) -> list[int]:
    """For each root the last node whose run reads its output or a view of it; itself where there is none."""
    return [max(found, default=n) for n, found in enumerate(storage_readers(graph))]


def _inverted(lists: Iterable[Iterable[int]]) -> list[list[int]]:
    """For each of as many nodes as there are lists the numbers of those that name it, ascending."""
    rows = [dict.fromkeys(row) for row in lists]
    found: list[list[int]] = [[] for _ in rows]
    for n, row in enumerate(rows):
        for i in row:
            found[i].append(n)
    return found


def saved_roots(graph: Graph) -> set[int]:
    """The nodes whose storage some backward reads."""
    return {graph.roots[i] for node in graph.nodes for i in node.saved}


def resting(graph: Graph, schedule: Schedule) -> frozenset[int]:
    """The nodes whose output is discarded once all have run, or before, and not again once a backward has read it.

    Where autograd holds the very tensors, they are empty from there to the run that makes the output for its readers;
    there is no state but these two, whatever order backwards run in. None where something runs again within the
    forward, whose outputs are emptied for other readers.
    """
    has_run, there, gone, read, found = set[int](), set[int](), set[int](), set[int](), set[int]()
    is_forward = True
    for kind, n in schedule:
        if kind == "F":
            if n in has_run and is_forward:
                if len(has_run) < len(graph.nodes):
                    return frozenset()
                is_forward = False
            if n in gone and n not in there:
                found.add(n)
                if n in read:
                    gone.remove(n)
            has_run.add(n)
            there.add(n)
        elif kind == "B":
            is_forward = False
            read.update(graph.nodes[n].saved)
        elif kind == "D":
            there.discard(n)
            if is_forward:
                gone.add(n)
    return frozenset(found & gone)


def resting_tapes(graph: Graph, schedule: Schedule) -> frozenset[int]:
    """The nodes whose tape is discarded right after it was made, and once only: one recomputation brings it back.

    Where it can be reached it is empty in between. None where something runs again within the forward.
    """
    held = {n for n, node in enumerate(graph.nodes) if node.is_tape_held}
    runs, discards, done, found = Counter[int](), Counter[int](), set[int](), set[int]()
    last_run, is_forward = -1, True
    for kind, n in schedule:
        if kind == "F":
            if runs[n] and is_forward:
                if len(runs) < len(graph.nodes):
                    return frozenset()
                is_forward = False
            last_run = n
            runs[n] += n not in done
        elif kind == "B":
            is_forward = False
            done.add(n)
        elif kind == "T" and n not in done:
            discards[n] += 1
            if n in held and n == last_run and runs[n] == 1 and is_forward:
                found.add(n)
    return frozenset(n for n in found if runs[n] == 2 and discards[n] == 1)


def needed_runs(graph: Graph, wanted: Iterable[int], is_there: Callable[[int], bool]) -> list[int]:
    """The nodes to run, in order, so that all of `wanted` are run: those, and what they read that is not there."""
    needed: set[int] = set()
    stack = list(wanted)
    while stack:
        n = stack.pop()
        if n not in needed:
            needed.add(n)
            stack += [i for i in graph.reads[n] if not is_there(i)]
    return sorted(needed)


@njit
def mark_needed(arrays: GraphArrays, outputs: Flags | Ints, is_needed: Flags, highest: int, pending: int) -> int:
    """As `needed_runs`: marks what the marked nodes, `pending` many up to `highest`, need; the lowest of all.

    `outputs` are 0 where nothing is resident. Where nothing is marked, the result lies above `highest`.
    """
    # Inputs have lower indices, so one way down finds all that is to run.
    lowest = highest + 1
    while pending > 0:
        lowest -= 1
        if is_needed[lowest]:
            pending -= 1
            for k in range(arrays.read_start[lowest], arrays.read_start[lowest + 1]):
                i = arrays.read[k]
                if not outputs[i] and not is_needed[i]:
                    is_needed[i] = True
                    pending += 1
    return lowest


@njit
def mark_missing(
    arrays: GraphArrays, n: int, outputs: Flags | Ints, tapes: Flags | Ints, is_needed: Flags
) -> tuple[int, int]:
    """Marks the nodes to run before the backward of `n`; the lowest and the highest of them, the lowest above if none.

    `outputs` and `tapes` are 0 where nothing is resident.
    """
    highest, pending = -1, 0
    for k in range(arrays.saved_start[n], arrays.saved_start[n + 1]):
        i = arrays.saved[k]
        if not outputs[i] and not is_needed[i]:
            is_needed[i] = True
            pending += 1
            highest = max(highest, i)
    if arrays.tape_bytes[n] > 0 and not tapes[n] and not is_needed[n]:
        is_needed[n] = True
        pending += 1
        highest = n
    return mark_needed(arrays, outputs, is_needed, highest, pending), highest
