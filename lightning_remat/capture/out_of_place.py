"""In-place activations as operations of their own: their input can then go before their backward has ended."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from ..module_state.hooks import has_hooks, with_submodules
from .recording import Record

# Those whose gradients do not depend, in any bit, on whether the input or the output was kept, and modules whose
# only attribute is `inplace`. ELU's gradient is computed from its output in place and from its input otherwise.
_MODULES: dict[type[nn.Module], Any] = {
    nn.ReLU: functional.relu,
    nn.ReLU6: functional.relu6,
    nn.SiLU: functional.silu,
    nn.Hardswish: functional.hardswish,
    nn.Hardsigmoid: functional.hardsigmoid,
    nn.Mish: functional.mish,
}
_FUNCTIONS = {functional.leaky_relu, *_MODULES.values()}
_IN_PLACE: dict[Any, Any] = {
    "relu_": torch.relu,
    torch.relu_: torch.relu,
    functional.relu_: torch.relu,
    functional.leaky_relu_: functional.leaky_relu,
}


def put_out_of_place(module: nn.Module, graph: fx.Graph, records: dict[fx.Node, Record]) -> int:
    """Exchanges in-place activations for their out-of-place form where nobody else reads what they overwrite.

    Args:
        module: The captured module; it keeps its flags.
        graph: What was captured, changed here.
        records: What its nodes did.

    Returns:
        How many were exchanged.
    """
    position = {n: i for i, n in enumerate(graph.nodes)}
    found = [n for n in graph.nodes if records[n].writes and _is_free(module, n, records, position)]
    exchanged = 0
    for n in found:
        target, args, kwargs = _out_of_place(module, n)
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


def _out_of_place(module: nn.Module, n: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What computes the same without writing: target, args and kwargs; the target None where nothing is known."""
    if n.op == "call_module":
        return _MODULES.get(type(module.get_submodule(str(n.target)))), n.args, {}
    if n.target in _FUNCTIONS:
        kwargs = {name: value for name, value in n.kwargs.items() if name != "inplace"}
        place = 2 if n.target is functional.leaky_relu else 1
        return n.target, n.args[:place], kwargs
    return _IN_PLACE.get(n.target), n.args, dict(n.kwargs)


def _is_free(module: nn.Module, n: fx.Node, records: dict[fx.Node, Record], position: dict[fx.Node, int]) -> bool:
    """Whether all that shares the overwritten storage was read before, and no hook saw it."""
    owners = records[n].writes
    before = [m for m in position if (m in owners or owners & records[m].views) and position[m] < position[n]]
    is_read = any(position[user] > position[n] for m in before for user in m.users)
    return not is_read and not any(_is_hooked(module, m) for m in (*before, n))


def _is_hooked(module: nn.Module, n: fx.Node) -> bool:
    return n.op == "call_module" and any(map(has_hooks, with_submodules(module.get_submodule(str(n.target)))))
