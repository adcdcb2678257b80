"""Pascal VOC 2012 segmentation by torchvision; nothing is downloaded unless asked for."""

from pathlib import Path

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import VOCSegmentation

from remat_recipes.data.loaders import evaluation_loader, training_loader
from remat_recipes.data.segmentation_transforms import image_and_mask


class Voc(LightningDataModule):
    """Segmentation into 21 classes, 255 where void; VOC's `val` is the test, every tenth image of `train` validates.

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
        batch_size: int = 8,
        image_size: int = 473,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.root = root
        self.download = download
        self.batch_size = batch_size
        self.image_size = image_size
        self.num_workers = num_workers

    def prepare_data(self) -> None:
        VOCSegmentation(self.root, image_set="train", download=self.download)  # says how to get what is missing

    def setup(self, stage: str) -> None:
        varied = self._images("train", vary=True)
        plain = self._images("train", vary=False)
        self.train_set = Subset(varied, [i for i in range(len(varied)) if i % 10])
        self.validation_set = Subset(plain, range(0, len(plain), 10))
        self.test_set = self._images("val", vary=False)

    def _images(self, split: str, *, vary: bool) -> VOCSegmentation:
        return VOCSegmentation(self.root, image_set=split, transforms=image_and_mask(self.image_size, vary=vary))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return training_loader(self.train_set, self.batch_size, self.num_workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return evaluation_loader(self.validation_set, self.batch_size, self.num_workers)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return evaluation_loader(self.test_set, self.batch_size, self.num_workers)
