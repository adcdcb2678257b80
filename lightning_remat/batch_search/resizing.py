"""The number of samples in a batch, and batches of any size made from one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from ..module_state.nesting import flatten, tensors_in


def has_batch_dimension(batch: Any) -> bool:
    """Whether any tensor of the batch has a dimension."""
    return any(t.dim() for t in tensors_in(batch))


def batch_size_of(batch: Any) -> int:
    """The number of samples in a batch: the leading dimension that most of its tensors have (ties: the first)."""
    sizes = Counter(t.shape[0] for t in tensors_in(batch) if t.dim())
    if not sizes:
        raise ValueError("the batch holds no tensor with a batch dimension: give batch_size='keep'")
    return sizes.most_common(1)[0][0]


def resized(batch: Any, size: int) -> Any:
    """A batch of `size` samples: those of `batch`, over and over.

    Every tensor whose leading dimension is the batch's is indexed along it; other leaves stay as they are.
    """
    present = batch_size_of(batch)
    if present == size:
        return batch
    index = torch.arange(size) % present

    def resize(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == present:
            return leaf.index_select(0, index.to(leaf.device))
        return leaf

    leaves, structure = flatten(batch)
    return structure.build(resize(leaf) for leaf in leaves)
