"""CIFAR-10 by torchvision; nothing is downloaded unless asked for."""

from pathlib import Path

from lightning.pytorch import LightningDataModule
from torch import Tensor, float32
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import CIFAR10
from torchvision.transforms import v2

from remat_recipes.data.loaders import evaluation_loader, training_loader

NUM_VALIDATION = 5000
TO_TENSOR = (
    v2.ToImage(),
    v2.ToDtype(float32, scale=True),
    v2.Normalize([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
)


class Cifar10(LightningDataModule):
    """Classification into 10 classes; 45 000 images to train (crops and flips), 5000 to validate, 10 000 to test.

    Args:
        root: folder that holds the data, or gets it.
        download: fetch what is missing in `prepare_data`.
        batch_size: samples a batch; read whenever a loader is made.
        image_size: side of the images in pixels.
        num_workers: worker processes a loader.
    """

    def __init__(
        self,
        root: str | Path = "datasets",
        download: bool = False,
        batch_size: int = 128,
        image_size: int = 32,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.root = root
        self.download = download
        self.batch_size = batch_size
        self.image_size = image_size
        self.num_workers = num_workers

    def prepare_data(self) -> None:
        for train in (True, False):
            CIFAR10(self.root, train=train, download=self.download)  # says how to get it where it is missing

    def setup(self, stage: str) -> None:
        resize = v2.Resize((self.image_size, self.image_size), antialias=True)
        plain = v2.Compose([*TO_TENSOR, resize])
        varied = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), *TO_TENSOR, resize])
        held_out = CIFAR10(self.root, transform=plain)  # the same images as `train_set`, without the variations
        first = len(held_out) - NUM_VALIDATION
        self.train_set = Subset(CIFAR10(self.root, transform=varied), range(first))
        self.validation_set = Subset(held_out, range(first, len(held_out)))
        self.test_set = CIFAR10(self.root, train=False, transform=plain)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return training_loader(self.train_set, self.batch_size, self.num_workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return evaluation_loader(self.validation_set, self.batch_size, self.num_workers)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return evaluation_loader(self.test_set, self.batch_size, self.num_workers)
