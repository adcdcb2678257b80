"""Whether a plan was made for a call: its bytes hold for inputs of the types and sizes that were profiled, only."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..budget import format_bytes
from ..measure.tensor_bytes import storage_bytes, tensor_kinds
from ..module_state.batches import tensors_held
from ..schedules.graph import Graph, TensorKind


def check_fit(graph: Graph, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises `ValueError` where the graph that a plan was made on is that of other inputs, or of another module."""
    if (reason := misfit(graph, module, args, kwargs)) is not None:
        raise ValueError(f"{reason}. Remedy: make the plan anew, for this module and these inputs")


def misfit(graph: Graph, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What tells a call from the one that was profiled; None if nothing does, or if that one is not known."""
    if not graph.profiled_on:
        return None
    given = tensor_kinds(tensors_held((args, kwargs)))
    if given != graph.profiled_on:
        return f"the plan was made for inputs {_listed(graph.profiled_on)} and is given {_listed(given)}"
    own_bytes = storage_bytes([*module.parameters(), *module.buffers()])
    if own_bytes != graph.static_bytes:
        return (
            f"the plan was made for {format_bytes(graph.static_bytes)} of parameters and buffers and "
            f"{type(module).__name__} has {format_bytes(own_bytes)} ({graph.static_bytes} and {own_bytes} bytes)"
        )
    return None


def _listed(kinds: tuple[TensorKind, ...]) -> str:
    return ", ".join(map(str, kinds)) or "without a tensor"
