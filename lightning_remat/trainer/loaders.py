"""Loaders that begin again after something was read from them, and loaders of another batch size."""

from __future__ import annotations

import copy
import io
import queue
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..module_state.preserve import record

Rebatch = Callable[[Any, int], Any]

_MANY = 1000
"""Entries of a data set's list that are looked at for further data sets."""


def begin_again(loader: Any) -> Callable[[], None]:
    """What puts a loader back to where it is now after something was read from it: generators, positions, counts.

    Global random states are the caller's.

    Raises:
        MisconfigurationException: What it reads cannot begin again.
    """
    holders = [loader]
    is_loader = isinstance(loader, DataLoader)
    dataset: Any = cast(Any, loader).dataset if is_loader else None
    if not is_loader or isinstance(dataset, IterableDataset):
        once = _read_once(dataset if is_loader else loader)
        if once is not None:
            raise MisconfigurationException(
                f"batch_size='auto' reads a batch to measure the model, and a {once} cannot begin again, so training "
                "would not get that batch: give batch_size='keep' or a number, which plan on the first batch that "
                "training brings, or data that begin anew with every iter()"
            )
    if is_loader:
        sampler: Any = cast(Any, loader).batch_sampler
        holders += [cast(Any, loader).sampler, sampler, getattr(sampler, "sampler", None), *_data_sets(dataset)]
    return record([], [h for h in holders if hasattr(h, "__dict__")], with_tensors=False)


def _read_once(source: Any) -> str | None:
    """The name of what a source of data reads from, if that gives everything only once."""
    for one in (source, *getattr(source, "__dict__", {}).values()):
        kind: type = type(cast(object, one))
        if hasattr(kind, "__next__") or issubclass(kind, (queue.Queue, queue.SimpleQueue, io.IOBase)):
            return kind.__name__
    return None


def _data_sets(dataset: Any) -> list[Any]:
    """A data set and those that it reads from."""
    found: list[Any] = []
    waiting = [dataset]
    while waiting:
        one = waiting.pop()
        if not any(one is f for f in found):
            found.append(one)
            values: list[Any] = list(getattr(one, "__dict__", {}).values())
            values += [item for v in values if isinstance(v, (list, tuple)) for item in cast(Any, v)[:_MANY]]
            waiting += [v for v in values if isinstance(v, Dataset)]
    return found


def readable(loader: Any) -> Any:
    """A loader of the same batches that starts no processes."""
    if not isinstance(loader, DataLoader):
        return loader
    clone = copy.copy(cast("DataLoader[Any]", loader))
    # Through __dict__: a DataLoader refuses assignment, and these are the defaults of a loader without workers.
    vars(clone).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0, _iterator=None)
    vars(clone)["_DataLoader__multiprocessing_context"] = None
    return clone


def samples_drawn(loader: Any) -> int | None:
    """Samples that a loader draws in an epoch, on this rank; None if it does not say."""
    # What a loader without a batch sampler draws may be batches.
    for source in (getattr(getattr(loader, "batch_sampler", None), "sampler", None), getattr(loader, "dataset", None)):
        with suppress(TypeError):  # an IterableDataset, a sampler without an end, or no DataLoader
            return len(cast(Any, source))
    return None


def largest_batch(drawn: Sequence[tuple[int | None, bool]]) -> int | None:
    """The largest batch for which all of several loaders yield something; None if that is not known.

    Args:
        drawn: The samples that each draws in an epoch, and whether those too few for another batch make a smaller one.
    """
    counts = [count for count, _ in drawn if count is not None]
    if len(counts) < len(drawn) or not drawn:
        return None
    dropping = [count for count, (_, is_kept) in zip(counts, drawn, strict=True) if not is_kept]
    return min([max(counts), *dropping])


def keeps_last_batch(loader: Any) -> bool:
    """Whether samples that are too few for another batch make a smaller one."""
    return not getattr(getattr(loader, "batch_sampler", loader), "drop_last", False)


def loader_batch_size(loader: Any) -> int | None:
    """The batch size that a loader yields, as far as it says."""
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(sampler, "batch_size", None)
    return size if isinstance(size, int) else getattr(loader, "batch_size", None)


def common_batch_size(loaders: Sequence[Any]) -> int | None:
    """The batch size that all of several loaders yield; None where one does not say, or says another."""
    sizes = {loader_batch_size(loader) for loader in loaders}
    return sizes.pop() if len(sizes) == 1 else None


def rebatched(loader: Any, size: int, rebatch: Rebatch | None = None) -> Any:
    """A loader like `loader`, of another batch size; the given one is left as it is.

    A copy gets a copy of the batch sampler with the new size. That serves direct DataLoaders, batch samplers of the
    user's, IterableDatasets and subclasses with constructors of their own, and loses neither sampler nor shuffling.

    Raises:
        MisconfigurationException: The loader does not say its batch size; the remedy is `rebatch_fn`.
    """
    if loader_batch_size(loader) == size:
        return loader
    if rebatch is not None:
        return rebatch(loader, size)
    sampler: Any = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or loader_batch_size(loader) is None:
        raise MisconfigurationException(
            f"cannot change the batch size of a {type(cast(object, loader)).__name__} to {size}: it does not say its "
            "batch size. Give rebatch_fn=lambda loader, batch_size: ..., or batch_size='keep'"
        )
    clone = copy.copy(cast("DataLoader[Any]", loader))
    if sampler is not None:
        if not isinstance(getattr(sampler, "batch_size", None), int):
            raise MisconfigurationException(
                f"cannot change the batch size of {type(sampler).__name__}: it has no integer `batch_size`. "
                "Give rebatch_fn=lambda loader, batch_size: ..., or batch_size='keep'"
            )
        sampler = copy.copy(sampler)
        sampler.batch_size = size
    vars(clone).update(batch_sampler=sampler, _iterator=None)
    if vars(clone).get("batch_size") is not None:
        vars(clone)["batch_size"] = size
    return clone
