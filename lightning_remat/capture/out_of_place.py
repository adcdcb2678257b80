"""In-place activations as operations of their own: their input can then go before their backward has ended."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional

from .aliasing import Record

# Those whose gradients do not depend, in any bit, on whether the input or the output was kept. ELU's gradient is
# computed from its output in place and from its input otherwise.
_FUNCTIONS = {
    functional.relu,
    functional.relu6,
    functional.silu,
    functional.hardswish,
    functional.hardsigmoid,
    functional.mish,
    functional.leaky_relu,
    functional.hardtanh,  # ReLU6 is one
}
_PLACES: dict[Any, int] = {functional.leaky_relu: 2, functional.hardtanh: 3}  # of the flag; 1 for the others
_IN_PLACE: dict[Any, Any] = {
    "relu_": torch.relu,
    torch.relu_: torch.relu,
    functional.relu_: torch.relu,
    functional.leaky_relu_: functional.leaky_relu,
}


def put_out_of_place(graph: fx.Graph, records: dict[fx.Node, Record]) -> int:
    """Exchanges in-place activations for their out-of-place form where nobody else reads what they overwrite.

    Args:
        graph: What was captured, changed here.
        records: What its nodes did.

    Returns:
        How many were exchanged.
    """
    position = {n: i for i, n in enumerate(graph.nodes)}
    found = [n for n in graph.nodes if records[n].writes and _is_free(n, records, position)]
    exchanged = 0
    for n in found:
        target, args, kwargs = _out_of_place(n)
        if target is None:
            continue
        with graph.inserting_before(n):
            other = graph.call_function(target, args, kwargs)
        other.meta.update(n.meta)
        other.stack_trace = n.stack_trace
        n.replace_all_uses_with(other)
        graph.erase_node(n)
        exchanged += 1
    return exchanged


def _out_of_place(n: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What computes the same without writing: target, args and kwargs; the target None where nothing is known."""
    if n.target in _FUNCTIONS:
        kwargs = {name: value for name, value in n.kwargs.items() if name != "inplace"}
        place = _PLACES.get(n.target, 1)
        return n.target, n.args[:place], kwargs
    return _IN_PLACE.get(n.target), n.args, dict(n.kwargs)


def _is_free(n: fx.Node, records: dict[fx.Node, Record], position: dict[fx.Node, int]) -> bool:
    """Whether all that shares the overwritten storage was made within the graph, and read before."""
    owners = records[n].writes
    if not all(owner.op.startswith("call") for owner in owners):
        return False
    before = [m for m in position if (m in owners or owners & records[m].views) and position[m] < position[n]]
    return not any(position[user] > position[n] for m in before for user in m.users)
