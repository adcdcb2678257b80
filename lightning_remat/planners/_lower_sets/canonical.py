"""The canonical strategy of a sequence of lower sets, as a schedule."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ...lowering import lower_kept, missing
from ...schedules.graph import Graph
from ...schedules.schedule import Action, Schedule
from ...schedules.storages import StorageGraph, nodes_of


def lower_sequence(
    graph: Graph,
    storages: StorageGraph,
    part: Sequence[int],
    *,
    liveness: bool = True,
    keeps_last: bool = True,
) -> Schedule:
    """The schedule that caches the boundaries of the lower sets and recomputes each part once, before its backward.

    First runs come in the graph's order, whatever the parts, so that random numbers and sums of gradients are those
    of the plain step. Only what a backward needs is recomputed.

    Args:
        graph: The operations.
        storages: The graph as storages.
        part: For each storage the number i of the part Vᵢ = Lᵢ ∖ Lᵢ₋₁ that holds it.
        liveness: Whether each value goes right after its last use (and is recomputed right before its first), or
            with its part, as the canonical strategy says.
        keeps_last: Whether the last part is kept for its backward, which follows at once, or recomputed as well.

    Reference: Kusumoto et al. 2019, section 3 (canonical strategy); section 5 and Appendix C (liveness analysis).
    """
    # v is in ∂(Lᵢ) for some i exactly if a later part than its own reads it.
    kept = {a for a, b in storages.edges if part[b] > part[a]}
    if keeps_last:
        last = max(part, default=0)
        kept |= {v for v, number in enumerate(part) if number == last}
    outputs = nodes_of(storages, kept)
    if liveness:
        return lower_kept(graph, outputs)
    return _lower_by_parts(graph, [part[p] for p in storages.place], outputs)


def _lower_by_parts(graph: Graph, part_of: Sequence[int], kept: set[int]) -> Schedule:
    """As `lower_kept`, but what is not kept goes when the forward, or the backward, of its part has ended."""
    actions: list[Action] = []
    ends: list[int] = []  # numbers of actions at which a part has ended
    outputs: set[int] = set()
    tapes: set[int] = set()
    parts: dict[int, list[int]] = {}
    for n, p in enumerate(part_of):
        parts.setdefault(p, []).append(n)

    def run(n: int) -> None:
        actions.append(Action("F", n))
        outputs.add(n)
        if graph.nodes[n].tape_bytes:
            tapes.add(n)

    for n, p in enumerate(part_of):
        run(n)
        if n == parts[p][-1]:
            ends.append(len(actions))
    for n in sorted(set(range(len(graph.nodes))) - kept):
        actions.append(Action("D", n))
        outputs.discard(n)
        if n in tapes:
            actions.append(Action("T", n))
            tapes.discard(n)
    for n in reversed(range(len(graph.nodes))):
        members = parts[part_of[n]]
        if n == members[-1]:
            needed = {m for member in members for m in missing(graph, member, outputs, tapes)}
            for m in sorted(needed):
                run(m)
        actions.append(Action("B", n))
        if n == members[0]:
            ends.append(len(actions))
    actions += [Action("D", n) for n in sorted(outputs)] + [Action("T", n) for n in sorted(tapes)]
    return _discard_at(graph, actions, ends)


def _discard_at(graph: Graph, actions: Sequence[Action], ends: Sequence[int]) -> Schedule:
    """The actions with each discard moved to the first of `ends` after the last use of what it discards."""
    last: dict[Action, int] = {}  # the discard that would end a residency -> number of actions up to its last use
    moved: dict[int, list[Action]] = {}
    for position, action in enumerate(actions):
        kind, n = action
        if kind in "DT":
            at = bisect_left(ends, last.pop(action))
            moved.setdefault(ends[at], []).append(action)
            continue
        used = graph.reads[n] if kind == "F" else graph.nodes[n].saved
        for i in (*used, n) if kind == "F" else used:
            last[Action("D", i)] = position + 1
        if graph.nodes[n].tape_bytes:
            last[Action("T", n)] = position + 1
    result: list[Action] = []
    for position, action in enumerate(actions):
        if action.kind in "FB":
            result.append(action)
        result += moved.get(position + 1, ())
    return Schedule(tuple(result))
