"""Batches of any kind: their tensors, wherever these are held, and copies that a step may take apart."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .nesting import flatten
from .plain_objects import is_plain

logger = logging.getLogger("lightning_remat")

_PLAIN_VALUES = (
    str, bytes, int, float, complex, type(None), np.ndarray, type, ModuleType, FunctionType, BuiltinFunctionType,
    MethodType,
)  # fmt: skip
"""Of what holds no tensors, that of which there may be many."""


def tensors_held(batch: Any) -> list[Tensor]:
    """The tensors of a batch, each once: those in mappings and in attributes of objects, too.

    A batch may be a graph with its nodes and edges, what a tokenizer returns, or a class of the user's.
    """
    return [part for part in _parts_of(batch) if isinstance(part, Tensor)]


def record_values(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """What gives tensors of which no module is in charge (a batch) the values that they have now.

    It writes only where something has changed, since such memory may not be ours to write.
    """
    tensors = [*tensors]
    cut = record_histories(tensors)
    strided = [t.detach() for t in tensors if t.layout is torch.strided and not t.is_nested]
    before = [(t, t.to("cpu", copy=True)) for t in strided if not isinstance(t, FakeTensor)]

    def put_back() -> None:
        cut()
        with torch.no_grad():
            for t, value in before:
                if not torch.equal(t.cpu(), value):
                    t.copy_(value)

    return put_back


def record_histories(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """What cuts tensors that ask for no gradients now from a parameter that was written into them since."""
    without = [t for t in tensors if not t.requires_grad]

    def cut() -> None:
        for t in without:
            if t.requires_grad:
                (t if t._base is None else t._base).detach_()  # PyTorch detaches no view

    return cut


def as_new(batch: Any, instead: Mapping[int, Tensor] = MappingProxyType({})) -> Any:
    """The batch as a step may have it: what it takes out, puts in or exchanges is not seen by the next one.

    Tensors are the very ones, and so is what is no part of a batch: modules, data sets, the trainer.

    Args:
        batch: Or arguments of a call.
        instead: By their identities, other tensors in the place of some.
    """
    leaves, structure = flatten(batch)
    return structure.build(_copied(leaf, instead) for leaf in leaves)


def cut_from_history(batch: Any) -> dict[int, Tensor]:
    """What to put instead of each tensor, as it is without a history; those with gradients ask for them.

    What was one tensor stays one: a graph is captured for inputs that are the same, or not. Of their classes they are
    still, and have the same attributes.
    """
    return {id(t): _cut(t) for t in tensors_held(batch)}


def detached(batch: Any) -> Any:
    """The batch as new, with every tensor cut from its history."""
    return as_new(batch, cut_from_history(batch))


def _cut(tensor: Tensor) -> Tensor:
    kind, new = type(tensor), tensor.detach()  # a mere tensor, of some subclasses
    if type(new) is Tensor and not issubclass(kind, nn.Parameter):
        new = new.as_subclass(kind)
    for name, value in vars(tensor).items():
        vars(new).setdefault(name, value)
    return new.requires_grad_(tensor.requires_grad)


def _copied(leaf: Any, instead: Mapping[int, Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        return instead.get(id(leaf), leaf)
    if isinstance(leaf, _PLAIN_VALUES) or not tensors_held(leaf):
        return cast(Any, leaf)
    try:
        return copy.deepcopy(leaf, {id(part): instead.get(id(part), part) for part in _parts_of(leaf)})
    except TypeError as error:  # it holds what is one of a kind: a file, a lock
        logger.info("a step is tried on the very %s, which cannot be copied: %s", type(leaf).__name__, error)
        return leaf


def _parts_of(batch: Any) -> Iterator[Any]:
    """What a batch is made of in the end, each once: tensors, and what is not looked into."""
    seen: dict[int, Any] = {}  # which live, so that their numbers hold
    waiting = [batch]
    while waiting:
        for leaf in flatten(waiting.pop())[0]:
            if isinstance(leaf, _PLAIN_VALUES) or id(leaf) in seen:
                continue
            seen[id(leaf)] = leaf
            if isinstance(leaf, Mapping):
                waiting.append(list(cast("Mapping[Any, Any]", leaf).values()))
            elif isinstance(leaf, (list, tuple, set, frozenset)):
                waiting.append(list(cast("Iterable[Any]", leaf)))
            elif isinstance(leaf, Tensor | nn.Module) or not is_plain(leaf):
                yield leaf
            else:
                slots = (name for kind in type(leaf).__mro__ for name in kind.__dict__.get("__slots__", ()))
                held = [getattr(leaf, name) for name in slots if name != "__dict__" and hasattr(leaf, name)]
                waiting.append([*held, *getattr(leaf, "__dict__", {}).values()])
