"""Random samples of any shape: for memory and time, where nothing is to be learned."""

from typing import Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from remat_recipes.data.loaders import evaluation_loader, training_loader

Target = Literal["class", "pixels", "tokens"]


class RandomDataset(Dataset[tuple[Tensor, Tensor]]):
    """Sample number `i` is a function of the arguments and `i` alone.

    Args:
        input_shape: of one sample, without the batch.
        num_classes: targets are below it, and tokens too.
        target: one class a sample, one class a pixel, or the next token at each position.
        num_samples: length of the data set.
        seed: of the samples.
    """

    def __init__(
        self, input_shape: tuple[int, ...], num_classes: int, target: Target, num_samples: int, seed: int
    ) -> None:
        if target not in ("class", "pixels", "tokens"):
            raise ValueError(f"target must be 'class', 'pixels' or 'tokens', not {target!r}")
        self.input_shape = tuple(input_shape)
        self.num_classes = num_classes
        self.target = target
        self.num_samples = num_samples
        self.seed = seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        random = torch.Generator().manual_seed(self.seed * self.num_samples + index)
        if self.target == "tokens":
            (length,) = self.input_shape
            tokens = torch.randint(self.num_classes, (length + 1,), generator=random)
            return tokens[:-1], tokens[1:]
        target_shape = () if self.target == "class" else self.input_shape[1:]
        image = torch.randn(self.input_shape, generator=random)
        return image, torch.randint(self.num_classes, target_shape, generator=random)


class Synthetic(LightningDataModule):
    """Random inputs and targets; training, validation and test differ in their seed only.

    Args:
        input_shape: of one sample, without the batch.
        num_classes: number of classes, or of tokens.
        target: one class a sample, one class a pixel, or the next token at each position.
        batch_size: samples a batch; read whenever a loader is made.
        num_samples: of each part.
        num_workers: worker processes a loader.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...] = (3, 224, 224),
        num_classes: int = 1000,
        target: Target = "class",
        batch_size: int = 32,
        num_samples: int = 256,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.train_set, self.validation_set, self.test_set = (
            RandomDataset(input_shape, num_classes, target, num_samples, seed) for seed in range(3)
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return training_loader(self.train_set, self.batch_size, self.num_workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return evaluation_loader(self.validation_set, self.batch_size, self.num_workers)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return evaluation_loader(self.test_set, self.batch_size, self.num_workers)
