"""How a tensor that autograd saved of an operation is reached from what the operation returned, without hooks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from .operation import Operation
from .saved_tensors import saved_values, storage_key

Route = str
"""What is written after a tensor to read another one, as `.grad_fn.next_functions[0][0]._saved_result`."""

_RECORDED_ALIKE = frozenset[Any](
    {
        *(torch.lstm_cell, torch.gru_cell, functional.cross_entropy, functional.nll_loss),
        *(functional.layer_norm, torch.layer_norm, functional.group_norm, torch.group_norm),
        *(functional.batch_norm, torch.batch_norm, functional.dropout, torch.dropout, functional.alpha_dropout),
        *(functional.relu, torch.relu, torch.relu_, "relu", "relu_", functional.leaky_relu, functional.elu),
        *(functional.silu, functional.hardtanh, functional.relu6, functional.hardswish),
    }
)


def is_recorded_alike(operation: Operation) -> bool:
    """Whether autograd records the same graph of an operation whatever the sizes, so that routes lead to the same.

    Not so of attention, which chooses among kernels: a route would end elsewhere, even in another operation's graph.
    """
    return all(part.target in _RECORDED_ALIKE for part in operation.parts if part not in operation.effects)


def routes_to_storages(made: Mapping[str, Tensor], since: int) -> dict[int, Route]:
    """The shortest route to each storage that autograd holds for the backward of the operation that made these.

    Of what a function of the user's saves, and of what has been written since, there is none.

    Args:
        made: The tensors that the operation returned, by what is written after what it returned to read each.
        since: The sequence number of the first of its nodes.
    """
    found: dict[int, Route] = {}
    seen: set[Any] = set()
    waiting: deque[tuple[Any, Route]] = deque((t.grad_fn, f"{route}.grad_fn") for route, t in made.items())
    while waiting:
        node, route = waiting.popleft()
        if node is None or node in seen or node._sequence_nr() < since:
            continue
        seen.add(node)
        if not isinstance(node, torch.autograd.function.BackwardCFunction):
            for name, tensor in _saved_in(node):
                if (key := storage_key(tensor)) is not None:
                    found.setdefault(key, f"{route}.{name}")
        waiting += [(next_, f"{route}.next_functions[{k}][0]") for k, (next_, _) in enumerate(node.next_functions)]
    return found


def _saved_in(node: Any) -> Iterator[tuple[Route, Tensor]]:
    """The tensors that a node holds."""
    for name, value in saved_values(node):
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            items = enumerate(cast("Sequence[Any]", value))
            yield from ((f"{name}[{k}]", item) for k, item in items if isinstance(item, Tensor))
