"""What processes that share a sharded module tell each other, so that all decide the same and none waits in vain."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn

from .sharding import has_units

T = TypeVar("T")

PATIENCE = timedelta(seconds=20)
"""How long a process whose step has failed waits to hear whether the others' has too."""

_numbers = itertools.count()


def is_shared(module: nn.Module) -> bool:
    """Whether other processes hold parts of the module: in a fake group, for planning alone, there are no others."""
    return has_units(module) and dist.get_backend() != "fake"


class OtherRankError(RuntimeError):
    """A step that all processes run together has failed on some of them, so that the others cannot go on."""


def first_rank(module: nn.Module, compute: Callable[[], T]) -> T:
    """What `compute` returns, or raises, on the first process, on every process that holds a part of the module.

    Of a module in one piece, what it returns here.
    """
    if not is_shared(module):
        return compute()

    def broadcast(outcome: object) -> Any:
        told = [outcome]
        cast(Any, dist).broadcast_object_list(told, src=0)
        return told[0]

    return told_by_first(compute, broadcast, is_first=dist.get_rank() == 0)


def told_by_first(compute: Callable[[], T], broadcast: Callable[[object], Any], *, is_first: bool) -> T:
    """What `compute` returns, or raises, on the first process, on every process.

    Args:
        compute: Called on the first.
        broadcast: Returns what it is given on the first, on every process.
        is_first: Whether this is the first.
    """
    outcome: tuple[T | None, Exception | None] = (None, None)
    if is_first:
        try:
            outcome = compute(), None
        except Exception as error:  # raised below, on every process
            outcome = None, error
    value, error = broadcast(outcome)
    if error is None:
        return value
    try:
        raise error
    finally:
        del outcome, error  # which hold this frame, and with it all that the caller holds


def all_ranks(module: nn.Module, value: T) -> list[T]:
    """The values of all processes that hold a part of the module."""
    if not is_shared(module):
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    cast(Any, dist).all_gather_object(found, value)
    return found


def together(module: nn.Module, run: Callable[[], T], is_limit: Callable[[Exception], bool] = lambda _: False) -> T:
    """What `run` returns, a step of a sharded module, in which the processes wait for each other.

    An error is raised as it is where every process meets the same. Where others do not, they wait for this process in
    the midst of the step, so that neither can go on.

    Args:
        module: The sharded module.
        run: Runs the step.
        is_limit: Of an error, whether it is one that processes tell each in words of its own, such as a lack of memory,
            so that it counts as the same.

    Raises:
        OtherRankError: The step has failed on some processes only, or otherwise than here.
    """
    if not is_shared(module):
        return run()
    number, rank, size = next(_numbers), dist.get_rank(), dist.get_world_size()
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    keys = [f"lightning_remat/{number}/{k}" for k in range(size)]
    try:
        value = run()
    except Exception as error:
        own = f"{type(error).__name__}: {error}"
        own = _LIMIT + own if is_limit(error) else own
        try:
            store.set(keys[rank], own)
            told = _outcomes(store, keys)
        except Exception as lost:  # the process that holds the store has gone
            raise OtherRankError(f"process {rank} of {size} has lost the others: {own.removeprefix(_LIMIT)}") from lost
        unlike = [(k, what) for k, what in enumerate(told) if not _is_alike(what, own)]
        for k, what in unlike:
            if what:
                raise OtherRankError(f"process {k} of {size} has failed: {what.removeprefix(_LIMIT)}") from error
        if unlike:
            raise OtherRankError(
                f"process {rank} of {size} has failed, and others have not: {own.removeprefix(_LIMIT)}"
            ) from error
        raise
    store.set(keys[rank], "")
    return value


_LIMIT = "limit: "
"""What a process puts before an error that others may meet in other words."""


def _is_alike(told: str | None, own: str) -> bool:
    return told == own or (told is not None and told.startswith(_LIMIT) and own.startswith(_LIMIT))


def _outcomes(store: Any, keys: list[str]) -> list[str | None]:
    """What each process has told: its error, empty where it has none, None where it is in the midst of the step."""
    with suppress(dist.DistStoreError):  # those that are silent are told apart below
        store.wait(keys, PATIENCE)
    return [store.get(key).decode() if store.check([key]) else None for key in keys]
