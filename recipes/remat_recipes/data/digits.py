"""scikit-learn's digits: 1797 real handwritten digits of 8 x 8 pixels, shipped with the library."""

import torch
from lightning.pytorch import LightningDataModule
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from remat_recipes.data.loaders import evaluation_loader, training_loader


class ShiftedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images moved by a random distance in both directions, anew at every reading; their edges are continued.

    Args:
        images: shape (n, channels, height, width).
        targets: shape (n,).
        num_pixels: the farthest distance.
    """

    def __init__(self, images: Tensor, targets: Tensor, num_pixels: int) -> None:
        self.size = images.shape[2:]
        self.padded = functional.pad(images, [num_pixels] * 4, mode="replicate")
        self.targets = targets
        self.num_pixels = num_pixels

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        top, left = torch.randint(2 * self.num_pixels + 1, (2,)).tolist()
        height, width = self.size
        return self.padded[index, :, top : top + height, left : left + width], self.targets[index]


class Digits(LightningDataModule):
    """Classification of digits into 10 classes; 1257 to train, 180 to validate and 360 to test, stratified.

    Args:
        batch_size: samples a batch; read whenever a loader is made.
        image_size: side of the images in pixels; the 8 x 8 originals are enlarged bilinearly.
        shift: farthest distance in pixels by which training images are moved at random.
        channels: the grey image is repeated so often (torchvision's networks want 3).
        num_workers: worker processes a loader.
        seed: of the split.
    """

    def __init__(
        self,
        batch_size: int = 64,
        image_size: int = 8,
        shift: int = 0,
        channels: int = 3,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.image_size = image_size
        self.shift = shift
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

        def part(indices: list[int]) -> tuple[Tensor, Tensor]:
            return pixels[indices].expand(-1, self.channels, -1, -1), targets[indices]  # channels share their storage

        self.train_set = ShiftedImages(*part(train), self.shift)
        self.validation_set, self.test_set = TensorDataset(*part(validation)), TensorDataset(*part(test))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return training_loader(self.train_set, self.batch_size, self.num_workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return evaluation_loader(self.validation_set, self.batch_size, self.num_workers)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return evaluation_loader(self.test_set, self.batch_size, self.num_workers)
