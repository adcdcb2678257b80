"""Arguments and results nested in tuples, lists, dictionaries, dataclasses and what pytrees know, as lists and back."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_CLEARS: tuple[Any, ...] = tuple(cast(Any, kind).clear for kind in (dict, UserDict))
"""A frozen dictionary has one of its own."""


@dataclass(frozen=True, slots=True)
class _Fields:
    """A dataclass among leaves: its class, and the names of its fields."""

    kind: type
    names: tuple[str, ...]

    def build(self, values: Iterable[Any]) -> Any:
        made: Any = object.__new__(cast(Any, self.kind))
        for name, field in zip(self.names, values, strict=True):
            object.__setattr__(made, name, field)
        return made


@dataclass(frozen=True, slots=True)
class _Items:
    """A dictionary of a class of its own among leaves, as a tokenizer returns: one without items, and its keys."""

    empty: Any
    keys: tuple[Any, ...]

    def build(self, values: Iterable[Any]) -> Any:
        made = copy.copy(self.empty)
        for key, value in zip(self.keys, values, strict=True):
            made[key] = value
        return made


@dataclass(frozen=True, slots=True)
class Structure:
    """How leaves are nested.

    Attributes:
        spec: The pytree.
        records: What holds further values among its leaves: place, how it is built of them, their structure.
    """

    spec: TreeSpec
    records: tuple[tuple[int, _Fields | _Items, Structure], ...]

    def build(self, leaves: Iterable[Any]) -> Any:
        """The nested value with these leaves."""
        leaves = iter(leaves)  # of an inner structure, those that are left
        records = {place: (record, structure) for place, record, structure in self.records}
        values: list[Any] = []
        for place in range(self.spec.num_leaves):
            if place in records:
                record, structure = records[place]
                values.append(record.build(structure.build(leaves).values()))
            else:
                values.append(next(leaves))
        return tree_unflatten(values, self.spec)


def flatten(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Structure]:
    """The leaves of a nested value, and what `build` makes it from again.

    Args:
        value: Any value.
        is_leaf: Tells what is not looked into.
    """
    parts, spec = tree_flatten(value, is_leaf)
    leaves: list[Any] = []
    records: list[tuple[int, _Fields | _Items, Structure]] = []
    for place, part in enumerate(parts):
        if (found := _record_of(part)) is None:
            leaves.append(part)
            continue
        record, values = found
        inner, structure = flatten(dict(enumerate(values)), is_leaf)  # a list might be taken for one of samples
        leaves += inner
        records.append((place, record, structure))
    return leaves, Structure(spec, tuple(records))


def _record_of(part: Any) -> tuple[_Fields | _Items, list[Any]] | None:
    """How something is built of the values that it holds, and those."""
    kind = type(cast(object, part))  # of what a proxy stands for, nothing need be known
    if dataclasses.is_dataclass(cast(Any, kind)):
        names = tuple(field.name for field in dataclasses.fields(cast(Any, kind)))
        return _Fields(kind, names), [getattr(part, name) for name in names]
    if issubclass(kind, (dict, UserDict)) and cast(Any, kind).clear in _CLEARS:
        empty = copy.copy(part)
        empty.clear()
        return _Items(empty, tuple(part.keys())), list(part.values())
    return None


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a nested value that `Structure.build` can exchange; see `batches.tensors_held` for all."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def extents_of(values: Any) -> tuple[int, ...]:
    """The sizes of all tensors in a nested value, one after another."""
    return tuple(extent for t in tensors_in(values) for extent in t.shape)
