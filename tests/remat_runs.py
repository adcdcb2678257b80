"""Small Lightning models and runs that the callback's tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Random images with labels, the same on every access."""

    def __init__(self, count: int = 64, size: int = 16) -> None:
        generator = torch.Generator().manual_seed(7)
        self.images = torch.randn(count, 3, size, size, generator=generator)
        self.labels = torch.randint(0, 5, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index] + 0.01 * torch.randn(()), self.labels[index]  # augments: draws random numbers


def network(width: int = 16, depth: int = 6) -> nn.Sequential:
    """Convolutions with batch norm and dropout: buffers and random numbers."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


class Classifier(LightningModule):
    """A network, a loss and Adam."""

    def __init__(self, net: nn.Module | None = None, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["net"])
        self.net = network() if net is None else net
        self.batch_size = batch_size
        self.steps = 0
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.steps += 1
        self.sizes.append(len(x))
        loss = functional.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        return DataLoader(Images(), batch_size=self.batch_size, shuffle=True)


class Unlimited(Classifier):
    """Enough data that memory is the limit."""

    def train_dataloader(self) -> Any:
        return DataLoader(Images(2000), batch_size=self.batch_size, shuffle=True)


def texts() -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(24, 24), nn.Sigmoid(), nn.Dropout(0.1)) for _ in range(8)]
    return nn.Sequential(nn.Embedding(30, 24), *blocks, nn.Linear(24, 30))


class Reader(Classifier):
    """Texts of these lengths, four of one length in a batch."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(texts())
        self.lengths = lengths

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return functional.cross_entropy(self.net(batch).transpose(1, 2), batch)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        data = [torch.randint(30, (length,), generator=generator) for length in self.lengths for _ in range(4)]
        return DataLoader(data, 4)  # pyright: ignore

    def optimizer_zero_grad(self, *args: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()  # so that all steps hold gradients


def run(
    root: Path, module: LightningModule, *callbacks: Callback, fit: dict[str, Any] | None = None, **options: Any
) -> Trainer:
    """Fits on the CPU without output, and hands the trainer back."""
    defaults: dict[str, Any] = {
        "max_steps": 4,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    trainer = Trainer(default_root_dir=root, callbacks=list(callbacks), **{**defaults, **options})
    trainer.fit(module, **(fit or {}))
    return trainer


def seeded(factory: Any = Classifier, **arguments: Any) -> Any:
    """A module with the same weights on every call, and the same random states after."""
    seed_everything(3, verbose=False)
    return factory(**arguments)


class Peaks(Logger):
    """Keeps the peaks that are logged."""

    name, version = "peaks", 0

    def __init__(self) -> None:
        super().__init__()
        self.peaks: list[float] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "remat/peak_bytes" in metrics:
            self.peaks.append(metrics["remat/peak_bytes"])
