"""Reading the first batch leaves no trace; a loader of another batch size is like the first."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_map
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
)

from lightning_remat.batch_search.resizing import batch_size_of, resized
from lightning_remat.module_state.random_state import preserved_random
from lightning_remat.trainer.loaders import begin_again, largest_batch, readable, rebatched, samples_drawn

pytestmark = pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*")

DATA = TensorDataset(torch.arange(20.0), torch.arange(20))


def read(loader: Any) -> Any:
    """The first batch, after which the loaders begin again."""
    loaders = CombinedLoader(loader, "max_size_cycle")
    with preserved_random():
        undo = [begin_again(one) for one in loaders.flattened]
        batch = next(iter(CombinedLoader(tree_map(readable, loaders.iterables), "max_size_cycle")))[0]
    for put_back in undo:
        put_back()
    return batch


@pytest.mark.parametrize("own_generator", [False, True])
def test_first_batch_is_the_one_that_training_sees(own_generator: bool) -> None:
    generator = torch.Generator().manual_seed(1) if own_generator else None
    loader = DataLoader(DATA, batch_size=4, shuffle=True, generator=generator)
    torch.manual_seed(5)
    seen = read(loader)
    again = next(iter(loader))
    torch.manual_seed(5)
    if generator is not None:
        generator.manual_seed(1)
    undisturbed = next(iter(loader))
    assert torch.equal(seen[0], undisturbed[0])
    assert torch.equal(again[0], undisturbed[0])


def test_workers_are_not_started() -> None:
    loader = DataLoader(DATA, batch_size=4, num_workers=2, persistent_workers=True, prefetch_factor=3)
    assert len(read(loader)[0]) == 4
    assert loader._iterator is None  # pyright: ignore[reportPrivateUsage]
    assert loader.num_workers == 2


def test_dataset_attributes_are_put_back() -> None:
    class Counting(IterableDataset[Any]):
        position = 0

        def __iter__(self) -> Any:
            while True:
                self.position += 1
                yield torch.tensor(self.position)

    dataset = Counting()
    assert read(DataLoader(dataset, batch_size=3)).tolist() == [1, 2, 3]
    assert dataset.position == 0


class Queued(IterableDataset[Any]):
    """Hands out what others put into a queue."""

    def __init__(self) -> None:
        self.source: queue.Queue[Any] = queue.Queue()

    def __iter__(self) -> Any:
        while not self.source.empty():
            yield self.source.get()


class Running(IterableDataset[Any]):
    """Goes on with an iterator."""

    def __init__(self) -> None:
        self.source = iter(range(5))

    def __iter__(self) -> Any:
        return self.source


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (iter([torch.ones(2)]), "list_iterator"),
        (DataLoader(Queued()), "Queue"),
        (DataLoader(Running()), "range_iterator"),
    ],
)
def test_what_reads_once_is_refused(loader: Any, name: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"a {name} cannot begin again"):
        read(loader)


def test_generators_of_data_sets_within_data_sets_are_put_back() -> None:
    class Noisy(Dataset[Any]):
        def __init__(self) -> None:
            self.generator = torch.Generator().manual_seed(0)
            self.own = [np.random.default_rng(0)]

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return torch.rand((), generator=self.generator) + self.own[0].random()

    loader = DataLoader(ConcatDataset([Subset(Noisy(), range(4))]), batch_size=2)
    first = read(loader)
    assert torch.equal(read(loader), first)
    assert torch.equal(next(iter(loader)), first)


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


def test_dataclass_batches_are_counted_and_resized() -> None:
    batch = {"pair": Pair(torch.arange(6).reshape(3, 2), torch.arange(3)), "weights": torch.ones(2)}
    assert batch_size_of(batch) == 3
    larger = resized(batch, 4)
    assert larger["pair"].x.tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert larger["pair"].y.tolist() == [0, 1, 2, 0]
    assert isinstance(larger["pair"], Pair)
    assert batch["pair"].x.shape == (3, 2)  # pyright: ignore


def test_several_loaders_give_a_batch_of_their_structure() -> None:
    loaders = {"a": DataLoader(DATA, batch_size=4), "b": DataLoader(DATA, batch_size=2)}
    batch = read(loaders)
    assert {k: len(v[0]) for k, v in batch.items()} == {"a": 4, "b": 2}


def images(*sizes: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full((3, size, size), float(size)) for size in sizes)


def objects(*counts: int) -> tuple[dict[str, torch.Tensor], ...]:
    return tuple({"boxes": torch.zeros(n, 4), "labels": torch.full((n,), n)} for n in counts)


def test_lists_of_samples_are_counted_and_resized() -> None:
    batch = images(8, 9), objects(1, 5)
    assert batch_size_of(batch, 2) == batch_size_of(batch) == 2
    larger = resized(batch, 5)
    assert [x.shape[1] for x in larger[0]] == [8, 9, 8, 9, 8]
    assert [y["labels"].tolist() for y in larger[1]] == [[1], [5] * 5, [1], [5] * 5, [1]]
    assert all(isinstance(part, tuple) for part in larger)
    assert [x.shape[1] for x in resized(batch, 1)[0]] == [8]
    pairs = [*zip(*batch, strict=True)]
    assert [len(y["labels"]) for _, y in resized(pairs, 3, 2)] == [1, 5, 1]
    assert batch_size_of([*images(8, 9)], 2) == 2


def test_objects_as_many_as_images_are_no_batch() -> None:
    larger = resized((images(8, 9), objects(2, 2)), 3, 2)
    assert [len(part) for part in larger] == [3, 3]
    assert [y["boxes"].shape for y in larger[1]] == [(2, 4)] * 3
    assert [len(part) for part in resized((images(8), objects(1)), 2, 1)] == [2, 2]


def test_stacked_images_keep_their_lists_of_objects() -> None:
    larger = resized((torch.ones(2, 3, 8, 8), objects(1, 5)), 4)
    assert larger[0].shape == (4, 3, 8, 8)
    assert [len(y["labels"]) for y in larger[1]] == [1, 5, 1, 5]


def test_containers_of_as_many_batches_as_samples_are_no_lists_of_samples() -> None:
    x, y = torch.ones(2, 5), torch.arange(2)
    assert [t.shape[0] for t in resized((x, y), 4, 2)] == [4, 4]
    assert [t.shape[0] for t in resized([x, x], 4, 2)] == [4, 4]
    several = resized([{"x": x, "y": y}, {"x": x, "y": y}], 4, 2)
    assert [(len(one["x"]), len(one["y"])) for one in several] == [(4, 4)] * 2
    assert resized((x, "name"), 4, 2)[1] == "name"
    assert batch_size_of([{"x": torch.ones(8, 3)}, {"x": torch.ones(4, 3)}], None) == 8
    assert [len(part) for part in resized((images(8, 9), images(7, 6)), 3, 2)] == [3, 3]


def test_resized_batches_repeat_or_cut_along_the_batch() -> None:
    batch = {"x": torch.arange(6).reshape(3, 2), "y": [torch.arange(3), "name"], "scale": torch.tensor(2.0)}
    assert batch_size_of(batch) == 3
    larger = resized(batch, 5)
    assert larger["x"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert larger["y"][0].tolist() == [0, 1, 2, 0, 1]
    assert larger["y"][1] == "name"
    assert larger["scale"].item() == 2.0
    assert resized(batch, 2)["x"].tolist() == [[0, 1], [2, 3]]
    assert resized(batch, 3) is batch


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, batch_size=4, shuffle=True, drop_last=True),
        DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, True)),
    ],
    ids=["direct", "batch-sampler"],
)
def test_rebatched_keeps_shuffling_and_the_given_loader(loader: Any) -> None:
    other = rebatched(loader, 5)
    batches = [b[0] for b in other]
    assert [len(b) for b in batches] == [5, 5, 5, 5]
    assert torch.cat(batches).tolist() != sorted(torch.cat(batches).tolist())
    assert len(other) == 4
    assert type(other.sampler) is type(loader.sampler)
    assert [len(b[0]) for b in loader] == [4] * 5
    assert rebatched(loader, 4) is loader


def test_loader_that_does_not_say_its_size_needs_a_function() -> None:
    class Buckets(Sampler[list[int]]):
        def __iter__(self) -> Any:
            return iter([[0, 1], [2, 3, 4]])

    loader = DataLoader(DATA, batch_sampler=Buckets())
    with pytest.raises(MisconfigurationException, match="rebatch_fn"):
        rebatched(loader, 7)
    other = rebatched(loader, 7, lambda loader, size: DataLoader(loader.dataset, batch_size=size))
    assert len(next(iter(other))[0]) == 7


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(lambda: torch.ones(4), None)


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(DATA, 4), 20),
        (DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=7)), 7),
        (DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA, True, 30), 4, True)), 30),
        (DataLoader(DATA, None, sampler=BatchSampler(RandomSampler(DATA), 4, False)), 20),  # it draws five batches
        (DataLoader(Endless(), 4), None),
        ([torch.ones(4)], None),
    ],
)
def test_samples_that_an_epoch_draws(loader: Any, expected: int | None) -> None:
    assert samples_drawn(loader) == expected


def test_a_batch_is_as_large_as_what_the_loaders_yield_some_of() -> None:
    assert largest_batch([]) is None
    assert largest_batch([(20, True), (None, True)]) is None
    assert largest_batch([(20, True), (7, True)]) == 20
    assert largest_batch([(20, False), (7, True)]) == 20
    assert largest_batch([(20, True), (7, False)]) == 7
