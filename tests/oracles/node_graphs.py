"""Random graphs of operations with every rule of the memory model in them, and chains to compare with by hand."""

import random
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from lightning_remat import Graph, Node


@st.composite
def node_graphs(draw: Any, *, least: int = 1, most: int = 8, views: bool = True) -> Graph:
    """Views, tapes, workspaces, passed-on gradients, several inputs and outputs, values no backward reads."""
    count = draw(st.integers(least, most))
    rng = random.Random(draw(st.integers(0, 2**32)))
    nodes: list[Node] = []
    for n in range(count):
        inputs = tuple(sorted(rng.sample(range(n), min(n, rng.choice([1, 1, 1, 2, 3]))))) if rng.random() < 0.95 else ()
        forward = rng.randrange(1, 10)
        cost = {"forward_seconds": float(forward), "backward_seconds": float(2 * forward)}
        if views and inputs and rng.random() < 0.15:
            nodes.append(Node(f"view{n}", "view", inputs, storage_of=rng.choice(inputs), **cost))
            continue
        saved = tuple(sorted(i for i in (*inputs, n) if rng.random() < 0.5))
        node = Node(
            f"op{n}",
            "op",
            inputs,
            saved,
            output_bytes=rng.randrange(1, 12),
            tape_bytes=rng.choice([0, 0, 0, rng.randrange(1, 6)]),
            forward_workspace_bytes=rng.choice([0, 0, rng.randrange(1, 6)]),
            backward_workspace_bytes=rng.choice([0, 0, rng.randrange(1, 6)]),
            parameter_bytes=rng.choice([0, 0, rng.randrange(1, 4)]),
            shares_gradient=inputs if rng.random() < 0.15 else None,
            **cost,
        )
        nodes.append(node)
    outputs = tuple(n for n in range(count) if all(n not in node.inputs for node in nodes))
    return Graph(tuple(nodes), input_bytes=rng.randrange(5), outputs=outputs if rng.random() < 0.7 else ())


def relu_chain(length: int, output_bytes: int = 100) -> Graph:
    """Equal operations in a row, each of which saves its own output."""
    cost = {"output_bytes": output_bytes, "forward_seconds": 1.0, "backward_seconds": 2.0}
    return Graph(tuple(Node(f"relu{i}", "relu", (i - 1,) if i else (), (i,), **cost) for i in range(length)))


def varied(graph: Graph, rng: random.Random) -> Graph:
    """Some gradients of their own size or none at all, tuples, gradients of inputs, and outputs that are let go of."""
    nodes = [
        replace(
            node,
            gradient_bytes=rng.choice([None, None, None, 0, rng.randrange(12)]),
            num_outputs=rng.choice([1, 1, 1, 2]),
            input_gradient_bytes=rng.choice([0, 0, rng.randrange(4)]),
            # No more than there is to let go of.
            backward_release_bytes=min(rng.choice([0, 0, rng.randrange(3)]), node.output_bytes + node.tape_bytes),
            backward_shared_bytes=rng.choice([0, 0, rng.randrange(3)]),
            backward_shared_release_bytes=min(
                rng.choice([0, 0, rng.randrange(3)]), node.output_bytes + node.tape_bytes
            ),
        )
        for node in graph.nodes
    ]
    let_go = tuple(n for n in range(len(nodes)) if rng.random() < 0.1)
    made = replace(graph, nodes=tuple(nodes), let_go=let_go)
    return made.holding_all if rng.random() < 0.5 else made


def priced(graph: Graph, rng: random.Random) -> Graph:
    """Recomputations, stretches of them, tapes and hooks cost something beside their kernels; some need no hooks."""
    nodes = (
        replace(
            n,
            rerun_price=rng.choice([0.0, 1.0]),
            stretch_price=rng.choice([0.0, 5.0]),
            tape_price=rng.choice([0.0, 3.0]),
            hook_price=rng.choice([0.0, 2.0]),
            held=tuple(i for i in n.saved if i < index and rng.random() < 0.5),
            is_tape_held=n.tape_bytes > 0 and rng.random() < 0.5,
            recording_seconds=rng.choice([0.0, n.forward_seconds / 4]),
        )
        for index, n in enumerate(graph.nodes)
    )
    return replace(graph, nodes=tuple(nodes))
