"""Plans the graphs that are named as arguments, one after the other, by every planner; prints what each answered."""

import json
import sys
from dataclasses import replace
from typing import Any

from lightning_remat import PLANNERS, Graph, InfeasibleBudgetError, Node, simulate
from lightning_remat.lowering import lower_kept

OPTIONS: dict[str, dict[str, Any]] = {"auto": {"effort": 0.05}}


def block(n: int) -> tuple[Node, ...]:
    """Four operations with a skip, a view and a tape; every block is of another size and duration."""
    size = 40 + 37 * n * n % 61
    before = (4 * n - 1,) if n else ()
    return (
        Node(f"conv{n}", "conv2d", before, before, size, 0, 2.0 + 17 * n * n % 13, 10.0, forward_workspace_bytes=9),
        Node(f"norm{n}", "batch_norm", (4 * n,), (4 * n,), size, 3, 1.0, 2.0, parameter_bytes=4),
        Node(f"view{n}", "view", (4 * n + 1,), storage_of=4 * n + 1, forward_seconds=0.1),
        Node(f"add{n}", "add", (4 * n, 4 * n + 2), (4 * n + 3,), size // 2, 0, 0.5, 0.5),
    )


NET = Graph(tuple(node for n in range(8) for node in block(n)), input_bytes=5, outputs=(31,))
GRAPHS = {
    "net": NET,
    "doubled": replace(NET, nodes=tuple(replace(n, output_bytes=2 * n.output_bytes) for n in NET.nodes)),
    "slower": replace(NET, nodes=tuple(replace(n, forward_seconds=9 - n.forward_seconds / 2) for n in NET.nodes)),
}


def answers(planner: str, graph: Graph) -> str:
    """The schedules at twenty budgets down from the plain peak, those of no use as the least bytes that would be."""
    plain = simulate(graph, lower_kept(graph, range(len(graph.nodes))))
    found: list[str] = []
    for share in range(20, 0, -1):
        try:
            schedule = PLANNERS[planner](graph, share * plain.peak_bytes // 20, **OPTIONS.get(planner, {}))
            found.append(str(schedule))
        except InfeasibleBudgetError as error:
            found.append(f"at least {error.minimum_bytes}")
            break
    return "; ".join(found)


if __name__ == "__main__":
    print(json.dumps([{planner: answers(planner, GRAPHS[name]) for planner in PLANNERS} for name in sys.argv[1:]]))
