"""segmentation_models_pytorch, and recurrent networks."""

from __future__ import annotations

import importlib
from functools import partial

from torch import Tensor, nn

from ..lstm import LSTM
from .architecture import Architecture, on_images, tokens


class StackedLSTM(nn.Module):
    """Two `nn.LSTM` on top of each other, each one operation, between an embedding and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        self.lower, self.upper = nn.LSTM(128, 256, batch_first=True), nn.LSTM(256, 256, batch_first=True)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(256, 1000)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lower(self.embedding(x))
        y, _ = self.upper(self.dropout(y))
        return self.head(self.dropout(y))


def _segmentation(name: str) -> nn.Module:
    library = importlib.import_module("segmentation_models_pytorch")
    return getattr(library, name)(encoder_name="resnet18", encoder_weights=None)


OTHERS = (
    *(
        Architecture("segmentation_models_pytorch", name, partial(_segmentation, name), on_images(2, 64))
        for name in ("Unet", "FPN", "PSPNet", "DeepLabV3Plus")
    ),
    Architecture(
        "recipes",
        "LSTM (unrolled)",
        lambda: LSTM(hidden_size=256, num_steps=16),
        lambda: ((tokens(2, 16, 1000),), {}),
    ),
    Architecture("torch", "nn.LSTM", StackedLSTM, lambda: ((tokens(32, 64, 1000),), {})),
)
