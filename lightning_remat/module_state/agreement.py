"""What processes that share a sharded module tell each other, so that all decide the same and none waits in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn

from .sharding import has_units

T = TypeVar("T")


class OtherRankError(RuntimeError):
    """Another process has failed, with the error that is told."""


def first_rank(module: nn.Module, compute: Callable[[], T]) -> T:
    """What `compute` returns, or raises, on the first process, on every process that holds a part of the module.

    Of a module in one piece, what it returns here.
    """
    if not has_units(module):
        return compute()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome = [compute(), None]
        except Exception as error:  # raised below, on every process
            outcome = [None, error]
    cast(Any, dist).broadcast_object_list(outcome, src=0)
    value, error = outcome
    if error is not None:
        raise error
    return value


def all_ranks(module: nn.Module, compute: Callable[[], T]) -> list[T]:
    """What `compute` returns on each process that holds a part of the module; an error of one ends it on all.

    Raises:
        OtherRankError: It has failed on another process only.
    """
    if not has_units(module):
        return [compute()]
    own: tuple[T | None, Exception | None]
    try:
        own = compute(), None
    except Exception as error:
        own = None, error
    told = own[0], None if own[1] is None else f"{type(own[1]).__name__}: {own[1]}"
    found: list[Any] = [None] * dist.get_world_size()
    cast(Any, dist).all_gather_object(found, told)
    if own[1] is not None:
        raise own[1]
    for rank, (_, error) in enumerate(found):
        if error is not None:
            raise OtherRankError(f"process {rank} of {len(found)} has failed: {error}")
    return [value for value, _ in found]
