"""Oxford-IIIT Pet by torchvision, for segmentation; nothing is downloaded unless asked for."""

from pathlib import Path

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import OxfordIIITPet

from remat_recipes.data.loaders import evaluation_loader, training_loader
from remat_recipes.data.segmentation_transforms import image_and_mask


class OxfordPet(LightningDataModule):
    """Segmentation into pet, background and border (classes 0, 1, 2); every tenth training image validates.

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
        batch_size: int = 16,
        image_size: int = 256,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.root = root
        self.download = download
        self.batch_size = batch_size
        self.image_size = image_size
        self.num_workers = num_workers

    def prepare_data(self) -> None:
        OxfordIIITPet(self.root, download=self.download)  # says how to get it where it is missing

    def setup(self, stage: str) -> None:
        varied = self._images("trainval", vary=True)
        plain = self._images("trainval", vary=False)
        self.train_set = Subset(varied, [i for i in range(len(varied)) if i % 10])
        self.validation_set = Subset(plain, range(0, len(plain), 10))
        self.test_set = self._images("test", vary=False)

    def _images(self, split: str, *, vary: bool) -> OxfordIIITPet:
        transform = image_and_mask(self.image_size, vary=vary, first_label=1)
        return OxfordIIITPet(self.root, split, "segmentation", transforms=transform)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return training_loader(self.train_set, self.batch_size, self.num_workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return evaluation_loader(self.validation_set, self.batch_size, self.num_workers)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return evaluation_loader(self.test_set, self.batch_size, self.num_workers)
