"""`tensor.data = other` in a captured graph: one call, which torch until 2.13 captures as two.

Those are `set_`, which autograd's versions count, and one that lowers the version again, as nothing is to be noticed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_LOWERS = "_lower_version_count_by_1"
_NEWER: Any = getattr(torch.ops.aten, "shallow_copy_data_", None)


def exchange_data(tensor: Tensor, other: Tensor) -> None:
    """What the user wrote."""
    tensor.data = other


EXCHANGES = {exchange_data, *([] if _NEWER is None else [_NEWER, _NEWER.default])}
"""The calls that do it, in any version."""


def join_exchanges(graph: fx.Graph) -> None:
    """Puts one call in the place of two."""
    for lowers in [n for n in graph.nodes if getattr(n.target, "__name__", "") == _LOWERS]:
        (sets,) = lowers.all_input_nodes
        with graph.inserting_before(sets):
            graph.call_function(exchange_data, sets.args).meta = dict(sets.meta)
        for n in (lowers, sets):
            n.replace_all_uses_with(sets.all_input_nodes[0])
            graph.erase_node(n)
