"""Arguments and results nested in tuples, lists, dicts, dataclasses and what pytrees know, as flat lists and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True, slots=True)
class Structure:
    """How leaves are nested.

    Attributes:
        spec: The pytree.
        records: The dataclasses among its leaves: place, class, names of the fields, structure of their values.
    """

    spec: TreeSpec
    records: tuple[tuple[int, type, tuple[str, ...], Structure], ...]

    def build(self, leaves: Iterable[Any]) -> Any:
        """The nested value with these leaves."""
        leaves = iter(leaves)  # of an inner structure, those that are left
        records = {place: (kind, names, structure) for place, kind, names, structure in self.records}
        values: list[Any] = []
        for place in range(self.spec.num_leaves):
            if place not in records:
                values.append(next(leaves))
                continue
            kind, names, structure = records[place]
            value: Any = object.__new__(cast(Any, kind))
            for name, field in zip(names, structure.build(leaves), strict=True):
                object.__setattr__(value, name, field)
            values.append(value)
        return tree_unflatten(values, self.spec)


def flatten(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Structure]:
    """The leaves of a nested value, and what `build` makes it from again.

    Args:
        value: Any value.
        is_leaf: Tells what is not looked into.
    """
    parts, spec = tree_flatten(value, is_leaf)
    leaves: list[Any] = []
    records: list[tuple[int, type, tuple[str, ...], Structure]] = []
    for place, part in enumerate(parts):
        kind = type(cast(object, part))  # of what a proxy stands for, nothing need be known
        if dataclasses.is_dataclass(cast(Any, kind)):
            names = tuple(field.name for field in dataclasses.fields(cast(Any, kind)))
            inner, structure = flatten([getattr(part, name) for name in names], is_leaf)
            leaves += inner
            records.append((place, kind, names, structure))
        else:
            leaves.append(part)
    return leaves, Structure(spec, tuple(records))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a nested value."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def extents_of(values: Any) -> tuple[int, ...]:
    """The sizes of all tensors in a nested value, one after another."""
    return tuple(extent for t in tensors_in(values) for extent in t.shape)
