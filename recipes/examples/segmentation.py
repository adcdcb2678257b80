"""Segmentation on one device: a U-Net in 75 % of its memory, on a GPU where there is one, else on the CPU.

python recipes/examples/segmentation.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_remat import Rematerialization


class Discs(Dataset[tuple[Tensor, Tensor]]):
    """Bright discs on noise, with the class of every pixel."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x, y, radius = torch.rand(3, generator=generator) * torch.tensor([1, 1, 0.3]) + torch.tensor([0, 0, 0.1])
        grid = torch.linspace(0, 1, self.size)
        inside = (grid[None] - x) ** 2 + (grid[:, None] - y) ** 2 < radius**2
        return torch.randn(3, self.size, self.size, generator=generator) + 2 * inside, inside.long()


def convolutions(inner: int, outer: int) -> nn.Sequential:
    """Two of them, each normalized."""
    layers = [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(outer, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True))


class SmallUNet(LightningModule):
    """A U-Net with one long skip: no `checkpoint_sequential` can be put around it, and none is needed."""

    def __init__(self, width: int = 16, num_classes: int = 2) -> None:
        super().__init__()
        self.down, self.bottom = convolutions(3, width), convolutions(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge, self.head = convolutions(2 * width, width), nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.down(images)
        risen = self.up(self.bottom(nn.functional.max_pool2d(fine, 2)))
        return self.head(self.merge(torch.cat([fine, risen], dim=1)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, classes = batch
        loss = nn.functional.cross_entropy(self(images), classes)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(
    memory_budget: str = "75%", size: int = 96, max_steps: int = 8, folder: str = "outputs/examples"
) -> Rematerialization:
    """The callback after the run."""
    remat = Rematerialization(memory_budget=memory_budget, batch_size="keep")
    trainer = Trainer(accelerator="auto", devices=1, max_steps=max_steps, callbacks=[remat], default_root_dir=folder)
    trainer.fit(SmallUNet(), DataLoader(Discs(64, size), batch_size=8))
    return remat


if __name__ == "__main__":
    main()
