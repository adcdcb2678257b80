"""The networks of the papers at the papers' batch sizes, profiled on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision import models

from lightning_remat import Graph, profile, trace
from remat_recipes.networks.gpt import GPT
from remat_recipes.networks.lstm import LSTM
from remat_recipes.networks.pspnet import PSPNet
from remat_recipes.networks.unet import UNet


@dataclass(frozen=True, slots=True)
class PaperNetwork:
    """A network with the batch that it is planned for and the one that its seconds are measured at.

    Attributes:
        build: Makes the module.
        batch: Makes the input for a batch size.
        batch_size: That of the paper.
        small_batch_size: At which the seconds are measured, to be scaled.
        lowest_reduction: By which the lowest peak must lie under the plain one, where a target is set.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Tensor]
    batch_size: int
    small_batch_size: int
    lowest_reduction: float | None = None

    def graph(self) -> Graph:
        """Its operations: bytes exact, seconds estimated from operation counts."""
        with FakeTensorMode(allow_non_fake_inputs=True):
            return self.profiled(self.batch_size)

    def measured_graph(self) -> Graph:
        """Its operations: bytes exact, seconds measured on the CPU at the small batch and scaled."""
        factor = self.batch_size / self.small_batch_size
        return self.graph().with_seconds_of(self.profiled(self.small_batch_size), factor)

    def profiled(self, batch_size: int) -> Graph:
        """Its operations at a batch size, measured on real tensors unless a fake mode is on."""
        module, batch = self.build(), self.batch(batch_size)
        return profile(trace(module, batch), batch)


def images(size: int, channels: int = 3) -> Callable[[int], Tensor]:
    return lambda batch_size: torch.randn(batch_size, channels, size, size)


def tokens(length: int, vocabulary_size: int) -> Callable[[int], Tensor]:
    return lambda batch_size: torch.randint(vocabulary_size, (batch_size, length))


NETWORKS: dict[str, PaperNetwork] = {
    "resnet50": PaperNetwork(models.resnet50, images(224), 96, 4, 0.74),
    "resnet152": PaperNetwork(models.resnet152, images(224), 48, 4, 0.82),
    "vgg19": PaperNetwork(models.vgg19, images(224), 64, 4, 0.30),
    "densenet161": PaperNetwork(models.densenet161, images(224), 32, 4, 0.85),
    "googlenet": PaperNetwork(
        lambda: models.googlenet(init_weights=False, aux_logits=False), images(224), 256, 8, 0.71
    ),
    "inception_v3": PaperNetwork(
        lambda: models.inception_v3(init_weights=False, aux_logits=False), images(300), 32, 4, 0.67
    ),
    "unet": PaperNetwork(UNet, images(572, 1), 8, 1, 0.50),
    "pspnet": PaperNetwork(PSPNet, images(713), 2, 2, 0.80),
    "lstm": PaperNetwork(LSTM, tokens(64, 5000), 64, 4),
    "gpt": PaperNetwork(GPT, tokens(1024, 50257), 8, 1),
}
