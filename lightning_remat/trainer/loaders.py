"""The first batch without disturbing a loader, and loaders of another batch size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

Rebatch = Callable[[Any, int], Any]


def first_batch(loaders: CombinedLoader) -> Any:
    """The first batch that an epoch would yield, read without worker processes from a copy of each loader.

    The loader's own generators are put back; the caller restores the global random states.

    Raises:
        MisconfigurationException: A loader can be read only once, or yields nothing.
    """
    for loader in loaders.flattened:
        if iter_is_consuming(loader):
            raise MisconfigurationException(
                f"the training data is a {type(loader).__name__}, an iterator that can be read only once: "
                "Rematerialization reads its first batch to measure the model; pass a DataLoader or an object whose "
                "iter() starts anew"
            )
    probing = CombinedLoader(tree_map(_readable, loaders.iterables), loaders._mode)  # pyright: ignore
    with _generators_kept(loaders):
        try:
            batch, _, _ = next(iter(probing))
        except StopIteration:
            raise MisconfigurationException("the training data yields no batch to measure the model with") from None
    return batch


def iter_is_consuming(loader: Any) -> bool:
    """Whether iterating takes the items away from the next iteration."""
    return hasattr(loader, "__next__") and not isinstance(loader, DataLoader)


def _readable(loader: Any) -> Any:
    if not isinstance(loader, DataLoader):
        return loader
    clone = copy.copy(cast("DataLoader[Any]", loader))
    # Through __dict__: a DataLoader refuses assignment, and these are the defaults of a loader without workers.
    vars(clone).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0, _iterator=None)
    vars(clone)["_DataLoader__multiprocessing_context"] = None
    return clone


@contextmanager
def _generators_kept(loaders: CombinedLoader) -> Generator[None]:
    """Puts back generators, and which values the attributes of samplers and datasets hold."""
    generators: dict[int, torch.Generator] = {}
    attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for loader in loaders.flattened:
        if not isinstance(loader, DataLoader):
            continue
        for name in ("dataset", "sampler", "batch_sampler", None):
            holder = cast(Any, loader if name is None else getattr(cast(Any, loader), name, None))
            state: dict[str, Any] | None = getattr(holder, "__dict__", None)
            if state is None:
                continue
            attributes.append((state, dict(state)))
            generators |= {id(v): v for v in state.values() if isinstance(v, torch.Generator)}
    states = [(generator, generator.get_state()) for generator in generators.values()]
    try:
        yield
    finally:
        for state, before in attributes:
            state.clear()
            state.update(before)
        for generator, generator_state in states:
            generator.set_state(generator_state)


def num_samples_in(loaders: CombinedLoader) -> int | None:
    """Samples in the largest data set; None if one does not say."""
    lengths: list[int] = []
    for loader in loaders.flattened:
        try:
            lengths.append(len(loader.dataset))
        except (AttributeError, TypeError):  # an IterableDataset, or no DataLoader
            return None
    return max(lengths, default=None)


def loader_batch_size(loader: Any) -> int | None:
    """The batch size that a loader yields, as far as it says."""
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(sampler, "batch_size", None)
    return size if isinstance(size, int) else getattr(loader, "batch_size", None)


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
