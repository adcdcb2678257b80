"""English text that needs no download: the language reference in the standard library's `pydoc_data.topics`."""

import re
from collections import Counter
from pydoc_data.topics import topics
from typing import Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from remat_recipes.data.loaders import evaluation_loader, training_loader

UNKNOWN = 0  # the number of every token outside the vocabulary


class Text(LightningDataModule):
    """Next-token prediction on 465 thousand characters of documentation: 80 % to train, 10 % each to validate and test.

    A sample is a window of `sequence_length` tokens and the same window one token later.

    Args:
        batch_size: windows a batch; read whenever a loader is made.
        sequence_length: tokens a window.
        level: what a token is: a character, or a word or punctuation mark.
        vocabulary_size: the most frequent tokens of the training text get a number each; number 0 is all others.
        num_workers: worker processes a loader.
    """

    def __init__(
        self,
        batch_size: int = 64,
        sequence_length: int = 64,
        level: Literal["character", "word"] = "character",
        vocabulary_size: int = 96,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if level not in ("character", "word"):
            raise ValueError(f"level must be 'character' or 'word', not {level!r}")
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.level = level
        self.vocabulary_size = vocabulary_size
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        text = "\n".join(topics[key] for key in sorted(topics))
        tokens = list(text) if self.level == "character" else re.findall(r"\w+|[^\w\s]|\n", text)
        first, second = len(tokens) * 8 // 10, len(tokens) * 9 // 10
        frequent = Counter(tokens[:first]).most_common(self.vocabulary_size - 1)
        self.vocabulary = {token: number for number, (token, _) in enumerate(frequent, start=UNKNOWN + 1)}
        numbers = torch.tensor([self.vocabulary.get(token, UNKNOWN) for token in tokens])
        self.train_set = self._windows(numbers[:first])
        self.validation_set = self._windows(numbers[first:second])
        self.test_set = self._windows(numbers[second:])

    def _windows(self, numbers: Tensor) -> TensorDataset:
        windows = numbers.unfold(0, self.sequence_length + 1, self.sequence_length)
        return TensorDataset(windows[:, :-1], windows[:, 1:])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return training_loader(self.train_set, self.batch_size, self.num_workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return evaluation_loader(self.validation_set, self.batch_size, self.num_workers)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return evaluation_loader(self.test_set, self.batch_size, self.num_workers)
