"""scikit-learn's digits: 1797 real handwritten digits of 8 x 8 pixels, shipped with the library."""

import torch
from lightning.pytorch import LightningDataModule
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from data.loaders import evaluation_loader, training_loader


class Digits(LightningDataModule):
    """Classification of digits into 10 classes; 1257 to train, 180 to validate and 360 to test, stratified.

    Args:
        batch_size: samples a batch; read whenever a loader is made.
        image_size: side of the images in pixels; the 8 x 8 originals are enlarged bilinearly.
        channels: the grey image is repeated so often (torchvision's networks want 3).
        num_workers: worker processes a loader.
        seed: of the split.
    """

    def __init__(
        self, batch_size: int = 64, image_size: int = 8, channels: int = 3, num_workers: int = 0, seed: int = 0
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.image_size = image_size
        self.channels = channels
        self.num_workers = num_workers
        self.seed = seed

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        rest, test = train_test_split(range(len(labels)), test_size=360, stratify=labels, random_state=self.seed)
        train, validation = train_test_split(rest, test_size=180, stratify=labels[rest], random_state=self.seed)

        pixels = torch.from_numpy(images).float().reshape(-1, 1, 8, 8)
        pixels = (pixels - pixels[train].mean()) / pixels[train].std()
        size = (self.image_size, self.image_size)
        pixels = functional.interpolate(pixels, size, mode="bilinear", align_corners=False)
        targets = torch.from_numpy(labels).long()

        def part(indices: list[int]) -> TensorDataset:
            grey = pixels[indices]
            return TensorDataset(grey.expand(-1, self.channels, -1, -1), targets[indices])  # channels share storage

        self.train_set, self.validation_set, self.test_set = part(train), part(validation), part(test)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return training_loader(self.train_set, self.batch_size, self.num_workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return evaluation_loader(self.validation_set, self.batch_size, self.num_workers)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return evaluation_loader(self.test_set, self.batch_size, self.num_workers)
