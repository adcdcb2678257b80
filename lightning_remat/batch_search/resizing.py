"""The number of samples in a batch, and batches of any size made from one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from ..module_state.nesting import flatten, tensors_in


def has_batch_dimension(batch: Any) -> bool:
    """Whether any tensor of the batch has a dimension."""
    return any(t.dim() for t in tensors_in(batch))


def batch_size_of(batch: Any, told: int | None = None) -> int:
    """The number of samples in a batch.

    It is what the loader tells, where tensors have that leading dimension, or lists that length. Where none tells, it
    is the length of a list of dictionaries that something else in the batch has too, as in detection the images have;
    or the leading dimension that most of the tensors have (ties: the first).
    """
    if told and _num_leaves(batch, told):
        return told
    lists = [leaf for leaf in tree_leaves(batch, is_leaf=_are_records) if _are_records(leaf)]
    found = next((len(some) for some in lists if _num_leaves(batch, len(some)) > 1), None)
    if found is not None:
        return found
    sizes = Counter(t.shape[0] for t in tensors_in(batch) if t.dim())
    if not sizes:
        raise ValueError("the batch holds no tensor with a batch dimension: give batch_size='keep'")
    return sizes.most_common(1)[0][0]


def resized(batch: Any, size: int, told: int | None = None) -> Any:
    """A batch of `size` samples: those of `batch`, over and over.

    Every tensor whose leading dimension is the batch's is indexed along it, and so are lists of samples that no tensor
    could hold together, such as images of several sizes; other leaves stay as they are.
    """
    present = batch_size_of(batch, told)
    if present == size:
        return batch
    order = [i % present for i in range(size)]

    def resize(leaf: Any) -> Any:
        if not _is_of_samples(leaf, present):
            return leaf
        if isinstance(leaf, Tensor):
            return leaf.index_select(0, torch.tensor(order, device=leaf.device))
        return type(leaf)(leaf[i] for i in order)

    leaves, structure = flatten(batch, is_leaf=_lists_in(batch, present))
    return structure.build(resize(leaf) for leaf in leaves)


def _num_leaves(batch: Any, size: int) -> int:
    """How many tensors and lists hold one thing of each sample, if there are so many."""
    return sum(_is_of_samples(leaf, size) for leaf in flatten(batch, is_leaf=_lists_in(batch, size))[0])


def _is_of_samples(leaf: Any, size: int) -> bool:
    """Whether a leaf of a batch, where lists of samples are leaves, holds one thing of each sample."""
    if isinstance(leaf, Tensor):
        return bool(leaf.dim()) and leaf.shape[0] == size
    return _is_uniform(leaf, size)


def _lists_in(batch: Any, size: int) -> Callable[[Any], bool]:
    """Tells which values in a batch are lists of samples.

    They hold as many values as there are samples, all of one structure, and not each of them is itself a batch: a pair
    of batches is none. Where some list is sure to be one, dictionaries that happen to look like batches are samples.
    """

    def are_samples(value: Any) -> bool:
        return _is_uniform(value, size) and not all(_is_batch(v, size) for v in value)

    def are_samples_too(value: Any) -> bool:
        return are_samples(value) or (_is_uniform(value, size) and _are_records(value))

    return are_samples_too if any(map(are_samples, tree_leaves(batch, is_leaf=are_samples))) else are_samples


def _is_batch(value: Any, size: int) -> bool:
    return _is_uniform(value, size) or all(_is_of_samples(leaf, size) for leaf in flatten(value)[0])


def _is_uniform(value: Any, size: int) -> bool:
    """Whether it is a list or tuple of that length, whose values have one structure and tensors."""
    if type(value) not in (list, tuple) or len(value) != size:
        return False
    specs = [tree_flatten(v)[1] for v in value]
    return bool(tensors_in(value)) and all(spec == specs[0] for spec in specs)


def _are_records(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and all(isinstance(v, dict) for v in value)
