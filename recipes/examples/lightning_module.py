"""One line in a Trainer: the largest batch size that fits into 64 MiB is found, and trained with.

python recipes/examples/lightning_module.py
"""

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_remat import Rematerialization


class Classifier(LightningModule):
    """An ordinary module: nothing in it knows of rematerialization."""

    def __init__(self, width: int = 16, depth: int = 6) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Images(LightningDataModule):
    """Random images. The callback sets `batch_size`, and the loaders are made again."""

    def __init__(self, batch_size: int = 16, count: int = 256) -> None:
        super().__init__()
        self.batch_size, self.count = batch_size, count

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(self.count, 3, 32, 32, generator=generator)
        labels = torch.randint(10, (self.count,), generator=generator)
        return DataLoader(TensorDataset(images, labels), self.batch_size, shuffle=True)


def main(memory_budget: str = "64MiB", max_epochs: int = 1, folder: str = "outputs/examples") -> int:
    """The batch size found."""
    remat = Rematerialization(memory_budget=memory_budget, batch_size="auto")
    Trainer(max_epochs=max_epochs, callbacks=[remat], default_root_dir=folder).fit(Classifier(), datamodule=Images())
    assert remat.result is not None
    return remat.result.batch_size


if __name__ == "__main__":
    main()
