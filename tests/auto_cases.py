"""A graph, budgets and an effort at which `auto` is tested, alone and in what is said of its plans."""

import pytest

from lightning_remat import Graph, InfeasibleBudgetError, Node, simulate
from lightning_remat.lowering import lower_kept
from lightning_remat.planners.auto import plan_auto

SMALL = 0.02  # effort


def convolutions(count: int = 12) -> Graph:
    """Convolution, batch norm and ReLU in turn, the convolution costly, the others cheap."""
    nodes: list[Node] = []
    for k in range(count):
        above = (3 * k - 1,) if k else ()
        nodes.append(Node(f"conv{k}", "conv2d", above, above, 100, 0, 10.0, 20.0, parameter_bytes=5))
        nodes.append(Node(f"norm{k}", "batch_norm", (3 * k,), (3 * k,), 100, 2, 1.0, 2.0))
        nodes.append(Node(f"relu{k}", "relu", (3 * k + 1,), (3 * k + 2,), 100, 0, 0.5, 1.0))
    return Graph(tuple(nodes), input_bytes=50)


def budgets(graph: Graph, number: int) -> list[int]:
    lowest = minimum(graph)
    highest = simulate(graph, lower_kept(graph, range(len(graph.nodes)))).peak_bytes
    return [lowest + (highest - lowest) * k // max(1, number - 1) for k in range(number)]


def minimum(graph: Graph) -> int:
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_auto(graph, -1, effort=SMALL)
    return int(caught.value.minimum_bytes)
