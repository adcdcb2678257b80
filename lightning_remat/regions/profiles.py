"""Profiles that serve again: measured anew, seconds differ, and with them the lowest peak that a search finds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..capture.dynamo import CapturedGraph
from ..execution.rerun_prices import rerun_prices
from ..operations.operation import TracedModule
from ..schedules.graph import Graph

_known: weakref.WeakKeyDictionary[CapturedGraph, dict[Hashable, Graph]] = weakref.WeakKeyDictionary()


def known_profile(traced: TracedModule, values: list[Any], options: dict[str, Any], make: Callable[[], Graph]) -> Graph:
    """The profile of a captured graph that was made of values of these kinds before, or the one that `make` makes now.

    So a budget that a module was refused with as the least is met when it is asked for.

    Args:
        traced: The operations of the graph.
        values: Tensors and numbers that come into it.
        options: Of the profile.
        make: Makes it.
    """
    of_graph = _known.setdefault(cast(CapturedGraph, traced.captured), {})
    names = tuple(operation.name for operation in traced.operations)  # in place, or out of place
    key = (names, tuple(map(kind_of, values)), tuple(sorted(options.items())))
    if key not in of_graph:
        if any(isinstance(v, FakeTensor) for v in values):
            of_graph[key] = make()
        else:  # of the operations the fastest runs count, wherever in that time the machine was fast: so of these, too
            before, graph = rerun_prices(), make()
            of_graph[key] = min(before, rerun_prices()).put_on(graph)
    return of_graph[key]


def kind_of(value: Any) -> Hashable:
    """What of a value decides what a captured graph does with it."""
    if not isinstance(value, Tensor):
        return value if isinstance(value, bool | int | float) else type(cast(object, value))
    layout = tuple(value.stride()) if value.layout is torch.strided else str(value.layout)
    return type(value), tuple(value.shape), layout, value.dtype, value.device, value.requires_grad
