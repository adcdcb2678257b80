"""The canonical strategy of a sequence of lower sets, as a schedule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...lowering import lower_kept, with_liveness
from ...schedules.arrays import encode
from ...schedules.graph import Graph
from ...schedules.schedule import Action, Schedule
from ...schedules.storages import StorageGraph, nodes_of
from ...schedules.uses import needed_runs


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
    parts: dict[int, list[int]] = {}
    for n, p in enumerate(part_of):
        parts.setdefault(p, []).append(n)

    def discard(nodes: set[int]) -> None:
        for n in sorted(nodes):
            actions.append(Action("D", n))
            if graph.nodes[n].tape_bytes:
                actions.append(Action("T", n))
        outputs.difference_update(nodes)

    for n, p in enumerate(part_of):
        actions.append(Action("F", n))
        outputs.add(n)
        if n == parts[p][-1]:
            ends.append(len(actions))
    discard(outputs - kept)
    for n in reversed(range(len(graph.nodes))):
        members = parts[part_of[n]]
        if n == members[-1]:
            taped = {m for m in members if graph.nodes[m].tape_bytes}
            wanted = taped.union(*(graph.nodes[m].saved for m in members))
            runs = needed_runs(graph, wanted - outputs, outputs.__contains__)
            actions += [Action("F", m) for m in runs]
            outputs.update(runs)
        actions.append(Action("B", n))
        if n == members[0]:
            ends.append(len(actions))
    discard(outputs)
    return with_liveness(graph, encode(graph, Schedule(tuple(actions))), np.array(ends, np.int64))
