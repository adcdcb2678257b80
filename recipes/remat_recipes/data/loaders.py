"""One way to make a DataLoader, so that every recipe shuffles, batches and drops the same."""

from typing import Any

from torch.utils.data import DataLoader, Dataset


def training_loader(dataset: Dataset[Any], batch_size: int, num_workers: int) -> DataLoader[Any]:
    """Shuffled batches of one size.

    The remainder is dropped: batch norm refuses a last batch of one, and a plan is made for one batch size. Only
    a data set smaller than a batch is given whole.
    """
    too_small = len(dataset) < batch_size  # pyright: ignore[reportArgumentType]
    return DataLoader(
        dataset,
        batch_size,
        shuffle=True,
        drop_last=not too_small,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )


def evaluation_loader(dataset: Dataset[Any], batch_size: int, num_workers: int) -> DataLoader[Any]:
    """Every sample once, in order."""
    return DataLoader(dataset, batch_size, num_workers=num_workers, persistent_workers=num_workers > 0)
