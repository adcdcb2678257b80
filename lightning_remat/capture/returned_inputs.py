"""What a module that runs as one operation returns of its own inputs is read where it was made.

Such a tensor is no result of the operation: who keeps the result would keep the input alive with it, uncounted.
"""

from __future__ import annotations

import operator

from torch import fx, nn

from ..module_state.hooks import has_hooks, with_submodules
from .decisions import Decision
from .recording import Record


def read_where_made(
    module: nn.Module, graph: fx.Graph, records: dict[fx.Node, Record], decisions: tuple[Decision, ...]
) -> set[fx.Node]:
    """Readers of an input that a module returned read the input itself: the very same tensor, to autograd as well.

    Args:
        module: The captured module.
        graph: What was captured, changed here.
        records: What its nodes did.
        decisions: Their nodes stay.

    Returns:
        The nodes from whose values the returned inputs may be left out, as nobody reads them there.
    """
    asked = {node for node, _, _ in decisions}
    found = [n for n in graph.nodes if records[n].returned and n.op == "call_module" and not _is_hooked(module, n)]
    return {n for n in found if _forward_readers(graph, n, records, asked)}


def _forward_readers(graph: fx.Graph, n: fx.Node, records: dict[fx.Node, Record], asked: set[fx.Node]) -> bool:
    """Lets the readers of the returned inputs in the value of `n` read them elsewhere; whether none is left."""
    is_unread = True
    for user in list(n.users):
        if user.target is not operator.getitem or user in asked:
            is_unread = False
        elif (source := records[user].is_returned) is not None:
            user.replace_all_uses_with(source)
            graph.erase_node(user)
        elif records[user].returned:
            is_unread &= _forward_readers(graph, user, records, asked)
    return is_unread


def _is_hooked(module: nn.Module, n: fx.Node) -> bool:
    """Whether hooks may see the returned tensors or their gradients."""
    return any(map(has_hooks, with_submodules(module.get_submodule(str(n.target)))))
