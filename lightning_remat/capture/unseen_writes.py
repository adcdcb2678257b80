"""Writes of which autograd learns nothing, each as a call of its own: `tensor.data = other`, norms of embeddings."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

_LOWERS = "_lower_version_count_by_1"
_NEWER: Any = getattr(torch.ops.aten, "shallow_copy_data_", None)
_EMBEDS = (functional.embedding, functional.embedding_bag)


def exchange_data(tensor: Tensor, other: Tensor) -> None:
    """What the user wrote."""
    tensor.data = other


def renormalize(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> None:
    """What an embedding does to the rows that it reads before it reads them."""
    torch.embedding_renorm_(weight.detach(), indices.contiguous(), max_norm, norm_type)


UNSEEN_WRITES = {exchange_data, renormalize, *([] if _NEWER is None else [_NEWER, _NEWER.default])}
"""The calls that write their first argument so, in any version."""


def set_apart(graph: fx.Graph) -> None:
    """Makes of what such a write is a part of, or the whole, this call and the rest."""
    _join_exchanges(graph)
    for n in [n for n in graph.nodes if n.target in _EMBEDS]:
        bound = inspect.signature(n.target).bind(*n.args, **n.kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if given["max_norm"] is not None:
            with graph.inserting_before(n):
                args = (given["weight"], given["input"], given["max_norm"], given["norm_type"])
                graph.call_function(renormalize, args).meta = dict(n.meta)
            given["max_norm"] = None
            n.args, n.kwargs = bound.args, bound.kwargs


def _join_exchanges(graph: fx.Graph) -> None:
    """One call, which torch until 2.13 captures as two.

    Those are `set_`, which autograd's versions count, and one that lowers the version again, as nothing is to be
    noticed.
    """
    for lowers in [n for n in graph.nodes if getattr(n.target, "__name__", "") == _LOWERS]:
        (sets,) = lowers.all_input_nodes
        with graph.inserting_before(sets):
            graph.call_function(exchange_data, sets.args).meta = dict(sets.meta)
        for n in (lowers, sets):
            n.replace_all_uses_with(sets.all_input_nodes[0])
            graph.erase_node(n)
