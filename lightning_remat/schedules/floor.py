"""Bounds that no schedule can beat: the lowest peak, node by node, and the least seconds."""

from __future__ import annotations

from dataclasses import dataclass

from .gradients import gradient_levels
from .graph import Graph


@dataclass(frozen=True, slots=True)
class Floor:
    """A bound on the peak of every schedule and the action that sets it.

    Attributes:
        bytes: What must be alive at once, whatever is kept or recomputed.
        node: Index of the node.
        phase: `"forward"` or `"backward"` of that node.
    """

    bytes: int
    node: int
    phase: str


def find_floor(graph: Graph) -> Floor:
    """A lower bound on the peak of every schedule of whole operations, with the action that sets it.

    During a backward the gradients of that moment, what the operation saved and its workspace are alive; during the
    first run of a node its inputs, output, tape and workspace; both beside inputs, parameters and outputs that the
    caller holds.

    Args:
        graph: The operations.
    """
    always = graph.input_bytes + graph.static_bytes
    _, highest = gradient_levels(graph)
    best = Floor(always, 0, "forward")
    held: set[int] = set()
    for n, node in enumerate(graph.nodes):
        roots = held | {graph.roots[i] for i in (*graph.reads[n], n)}
        alive = sum(graph.nodes[r].output_bytes for r in roots) + node.tape_bytes + node.forward_workspace_bytes
        if always + alive > best.bytes:
            best = Floor(always + alive, n, "forward")
        if n in graph.outputs:
            held.add(graph.roots[n])
    holds = {n: graph.roots[n] for n in graph.outputs}
    for n in reversed(range(len(graph.nodes))):
        node = graph.nodes[n]
        roots = {graph.roots[i] for i in node.saved} | {r for m, r in holds.items() if m <= n}
        alive = sum(graph.nodes[r].output_bytes for r in roots) + node.tape_bytes + highest[n]
        if always + alive > best.bytes:
            best = Floor(always + alive, n, "backward")
    return best
