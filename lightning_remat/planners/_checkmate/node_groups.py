"""Consecutive nodes as one: a coarser graph for planners whose cost grows with the square of the nodes."""

from __future__ import annotations

from ...schedules.gradients import gradient_levels
from ...schedules.graph import Graph, Node
from ...schedules.uses import last_reads


def group_nodes(graph: Graph, most: int) -> list[range]:
    """At most `most` runs of consecutive nodes, cut where the fewest bytes cross.

    The cuts are spread evenly, and each moves to the place of least crossing bytes among the nearest ones.
    """
    count = len(graph.nodes)
    if count <= most:
        return [range(n, n + 1) for n in range(count)]
    crossing = [0] * (count + 1)  # bytes of outputs made before place p and read at or after it
    for n, last in enumerate(last_reads(graph)):
        for p in range(n + 1, last + 1):
            crossing[p] += graph.nodes[n].output_bytes
    width = count / most
    cuts = [0]
    for c in range(1, most):
        low, high = max(cuts[-1] + 1, round((c - 0.5) * width)), round((c + 0.5) * width)
        places = range(low, min(max(high, low + 1), count))
        if places:
            cuts.append(min(places, key=lambda p: (crossing[p], abs(p - c * width))))
    return [range(a, b) for a, b in zip(cuts, [*cuts[1:], count], strict=True)]


def coarsen(graph: Graph, groups: list[range]) -> tuple[Graph, tuple[list[int], list[int]], list[frozenset[int]]]:
    """The graph of groups, the levels of its gradients, and for each group what its output stands for.

    The output of a group is what others read of it; what only its own backward reads is its tape. Levels are the
    highest of the members', so that the coarse memory is about that of the nodes, rather above it.

    Returns:
        The coarse graph; bytes of gradients before and at most during each group's backward; the roots that make up
        the output of each group.
    """
    home = {n: g for g, group in enumerate(groups) for n in group}
    shared: list[set[int]] = [set() for _ in groups]
    private: list[set[int]] = [set() for _ in groups]
    for k, node in enumerate(graph.nodes):
        for i in graph.reads[k]:
            if home[graph.roots[i]] != home[k]:
                shared[home[graph.roots[i]]].add(graph.roots[i])
        for i in node.saved:
            target = private if home[graph.roots[i]] == home[k] else shared
            target[home[graph.roots[i]]].add(graph.roots[i])
    for o in graph.outputs:
        shared[home[graph.roots[o]]].add(graph.roots[o])
    nodes = [_coarse_node(graph, group, home, shared, private) for group in groups]
    outputs = tuple(sorted({home[graph.roots[o]] for o in graph.outputs}))
    before, highest = gradient_levels(graph)
    levels = [max(before[n] for n in group) for group in groups], [max(highest[n] for n in group) for group in groups]
    coarse = Graph(tuple(nodes), graph.input_bytes, graph.static_bytes, outputs)
    return coarse, levels, [frozenset(roots) for roots in shared]


def _coarse_node(
    graph: Graph, group: range, home: dict[int, int], shared: list[set[int]], private: list[set[int]]
) -> Node:
    g = home[group.start]
    nodes = [graph.nodes[n] for n in group]
    inputs = {home[graph.roots[i]] for n in group for i in graph.reads[n]} - {g}
    saved = {
        home[graph.roots[i]] for node in nodes for i in node.saved if graph.roots[i] in shared[home[graph.roots[i]]]
    }
    output_bytes = sum(graph.nodes[r].output_bytes for r in shared[g])
    tape_bytes = sum(graph.nodes[r].output_bytes for r in private[g] - shared[g]) + sum(n.tape_bytes for n in nodes)
    # The run of the group, with what nothing keeps dropped after its last use.
    kept = shared[g] | private[g]
    last = {r: max([r, *(n for n in group for i in graph.reads[n] if graph.roots[i] == r)]) for r in group}
    alive = most = 0
    for n in group:
        node = graph.nodes[n]
        alive += node.output_bytes + node.tape_bytes
        most = max(most, alive + node.forward_workspace_bytes)
        alive -= sum(graph.nodes[r].output_bytes for r in range(group.start, n + 1) if last[r] == n and r not in kept)
    return Node(
        f"{nodes[0].name}…{nodes[-1].name}",
        "group",
        tuple(sorted(inputs)),
        tuple(sorted(saved)),
        output_bytes=output_bytes,
        tape_bytes=tape_bytes,
        forward_seconds=sum(n.forward_seconds for n in nodes),
        backward_seconds=sum(n.backward_seconds for n in nodes),
        forward_workspace_bytes=max(0, most - output_bytes - tape_bytes),
    )
