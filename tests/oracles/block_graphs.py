"""Graphs of blocks in a row, so that they have articulation points: single operations, residual and branching ones."""

import random
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from lightning_remat import Graph, Node


@st.composite
def block_graphs(draw: Any, *, most: int = 5) -> Graph:
    """Up to `most` blocks: a value alone crosses from block to block, seen through a view at times."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    nodes: list[Node] = []
    value = -1
    for _ in range(draw(st.integers(1, most))):
        value = rng.choice([_single, _single, _residual, _branches, _viewed])(rng, nodes, value)
    if rng.random() < 0.3:
        # A second output, whose gradient waits for a backward in the middle.
        _add(rng, nodes, (rng.randrange(len(nodes)),))
    last = len(nodes) - 1
    outputs = tuple(dict.fromkeys((value, last))) if rng.random() < 0.7 else ()
    return Graph(tuple(nodes), input_bytes=rng.randrange(5), static_bytes=rng.randrange(5), outputs=outputs)


def _add(rng: random.Random, nodes: list[Node], inputs: tuple[int, ...], **changes: Any) -> int:
    n = len(nodes)
    inputs = tuple(i for i in inputs if i >= 0)
    forward = rng.randrange(1, 10)
    fields: dict[str, Any] = {
        "inputs": inputs,
        "saved": tuple(i for i in (*inputs, n) if rng.random() < 0.6),
        "output_bytes": rng.randrange(1, 12),
        "tape_bytes": rng.choice([0, 0, rng.randrange(1, 6)]),
        "forward_workspace_bytes": rng.choice([0, 0, rng.randrange(1, 6)]),
        "backward_workspace_bytes": rng.choice([0, 0, rng.randrange(1, 6)]),
        "parameter_bytes": rng.choice([0, rng.randrange(1, 4)]),
        "forward_seconds": float(forward),
        "backward_seconds": float(2 * forward),
    }
    nodes.append(Node(f"op{n}", "op", **{**fields, **changes}))
    return n


def _single(rng: random.Random, nodes: list[Node], value: int) -> int:
    return _add(rng, nodes, (value,))


def _residual(rng: random.Random, nodes: list[Node], value: int) -> int:
    base = nodes[value].storage_of if value >= 0 else None
    size = nodes[value if base is None else base].output_bytes if value >= 0 else rng.randrange(1, 12)
    inner = _add(rng, nodes, (_add(rng, nodes, (value,)),), output_bytes=size)
    # An addition passes its gradient on to both sides.
    sides = tuple(i for i in (value, inner) if i >= 0)
    total = _add(rng, nodes, sides, saved=(), output_bytes=size, shares_gradient=sides)
    return _add(rng, nodes, (total,), saved=(len(nodes),))


def _branches(rng: random.Random, nodes: list[Node], value: int) -> int:
    left = _add(rng, nodes, (value,))
    right = _add(rng, nodes, (value,))
    return _add(rng, nodes, (left, right))


def _viewed(rng: random.Random, nodes: list[Node], value: int) -> int:
    base = _add(rng, nodes, (value,))
    view = Node(f"view{base + 1}", "view", (base,), storage_of=base, forward_seconds=0.5, backward_seconds=0.5)
    nodes.append(view)
    return base + 1


def persistent_sequences(first: int, last: int) -> Iterator[str]:
    """Every memory-persistent sequence of stages `first` to `last` that wastes nothing (beaumont2024, section 4.4)."""
    if first == last:
        yield f"Fall{first} B{first}"
        return
    for inner in persistent_sequences(first + 1, last):
        yield f"Fall{first} {inner} B{first}"
    for split in range(first + 1, last + 1):
        run = " ".join([f"Fck{first}", *(f"Fn{k}" for k in range(first + 1, split))])
        for above in persistent_sequences(split, last):
            for below in persistent_sequences(first, split - 1):
                yield f"{run} {above} {below}"
