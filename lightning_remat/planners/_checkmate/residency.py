"""What is resident between the steps of a training step becomes a schedule: the least recomputation for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...lowering import apply_liveness
from ...schedules.graph import Graph
from ...schedules.schedule import Action, Schedule
from ...schedules.uses import needed_runs


def lower_residency(
    graph: Graph,
    outputs: Sequence[Collection[int]],
    tapes: Sequence[Collection[int]],
    *,
    groups: Sequence[range],
    is_eager: bool,
) -> Schedule:
    """The schedule that holds the given values at the end of each step and recomputes what it then misses.

    With G groups, step t < G is the first run of group t, step 2G - 1 - g the backward of group g. Before a backward
    the step runs, in index order, the nodes that it needs from what is resident. A value that is neither wanted at
    the end of a step nor used in it goes after its last use.

    Args:
        graph: The operations.
        outputs: For each of the 2G steps, the nodes whose output is to be resident at its end. A view needs its
            storage's root beside it. What a step cannot have yet, or nothing needs any more, is left out.
        tapes: Likewise for tapes.
        groups: Consecutive nodes that make up one step each.
        is_eager: Whether a step recomputes also what it is only to hold; else it holds what is there anyway.

    Reference: Jain et al. 2020 (Checkmate), section 4.6: the minimal R for a given S.
    """
    count = len(groups)
    actions: list[Action] = []
    resident, taped = set[int](), set[int]()

    def run(wanted: set[int], retape: set[int]) -> None:
        for k in needed_runs(graph, (wanted - resident) | (retape - taped), resident.__contains__):
            actions.append(Action("F", k))
            resident.add(k)
            if graph.nodes[k].tape_bytes:
                taped.add(k)

    for step in range(2 * count):
        is_forward = step < count
        group = groups[step if is_forward else 2 * count - 1 - step]
        limit = group.stop if is_forward else group.start
        hold = {i for i in outputs[step] if i < limit}
        hold_tapes = {i for i in tapes[step] if i < limit and graph.nodes[i].tape_bytes}
        for m in group if is_forward else reversed(group):
            wanted = {m} if is_forward else set(graph.nodes[m].saved)
            retape = {m} if not is_forward and graph.nodes[m].tape_bytes else set[int]()
            is_last = m == (group[-1] if is_forward else group[0])
            run(wanted | hold, retape | hold_tapes) if is_eager and is_last else run(wanted, retape)
            if not is_forward:
                actions.append(Action("B", m))
        actions += [Action("D", i) for i in sorted(resident - hold, reverse=True)]
        actions += [Action("T", i) for i in sorted(taped - hold_tapes)]
        resident &= hold
        taped &= hold_tapes
    return apply_liveness(graph, Schedule(tuple(actions)))
