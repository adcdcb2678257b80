"""Networks as chains of stages, the form that `checkpoint_sequential` asks for; every method runs the same chain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.models.densenet import DenseNet
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.vgg import VGG

from remat_recipes.networks.gpt import GPT


class Block(nn.Sequential):
    """A stage that a user would wrap in a checkpoint of its own."""


class Embedding(nn.Module):
    """The first stage of a GPT: tokens to vectors."""

    def __init__(self, network: GPT) -> None:
        super().__init__()
        self.embedding, self.position, self.dropout = network.embedding, network.position, network.dropout

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.embedding(tokens) + self.position[: tokens.shape[1]])


class Opened(nn.Module):
    """The begin of a dense block: a list of features, of which there is one."""

    def forward(self, features: Tensor) -> list[Tensor]:
        return [features]


class Grown(nn.Module):
    """A layer of a dense block: all features so far, and its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        return [*features, self.layer(features)]


class Joined(nn.Module):
    """The end of a dense block: its features as one tensor."""

    def forward(self, features: list[Tensor]) -> Tensor:
        return torch.cat(features, 1)


def resnet_stages(network: ResNet) -> Iterable[nn.Module]:
    yield nn.Sequential(network.conv1, network.bn1, network.relu)
    yield network.maxpool
    for layer in (network.layer1, network.layer2, network.layer3, network.layer4):
        yield from layer
    yield nn.Sequential(network.avgpool, nn.Flatten(), network.fc)


def vgg_stages(network: VGG) -> Iterable[nn.Module]:
    # A segment must not begin with an in-place ReLU: checkpoint_sequential would overwrite what it keeps.
    modules = [*network.features, network.avgpool, nn.Flatten(), *network.classifier]
    for module, following in zip(modules, [*modules[1:], None], strict=True):
        if isinstance(following, nn.ReLU):
            yield Block(module, following)
        elif not isinstance(module, nn.ReLU):
            yield module


def densenet_stages(network: DenseNet) -> Iterable[nn.Module]:
    features = network.features
    yield nn.Sequential(features.conv0, features.norm0, features.relu0)
    yield nn.Sequential(features.pool0, Opened())
    for k in range(1, 5):
        yield from (Grown(layer) for layer in getattr(features, f"denseblock{k}").values())
        yield Joined()
        if k < 4:
            yield nn.Sequential(*getattr(features, f"transition{k}"), Opened())
    yield nn.Sequential(features.norm5, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    yield network.classifier


def gpt_stages(network: GPT) -> Iterable[nn.Module]:
    yield Embedding(network)
    yield from network.blocks
    yield nn.Sequential(network.norm, network.head)


BLOCKS = (BasicBlock, Bottleneck, Block, Grown, type(GPT(8, 8, 1, 1, 1).blocks[0]))
"""The stages that get a checkpoint each, where every block has one."""


@dataclass(frozen=True, slots=True)
class Network:
    """A network, with the sizes of a step that a CPU measures and those of the papers.

    Attributes:
        build: Makes it as a chain; True asks for one that a CPU trains in a second.
        batch: Makes the input from a batch size and an image size or length.
        cpu: Batch size and image size, or length, of the timed steps.
        paper: The same at the scale of the papers.
    """

    build: Callable[[bool], nn.Sequential]
    batch: Callable[[int, int], Tensor]
    cpu: tuple[int, int]
    paper: tuple[int, int]


def images(batch_size: int, size: int) -> Tensor:
    return torch.randn(batch_size, 3, size, size)


def tokens(batch_size: int, length: int) -> Tensor:
    return torch.randint(1000, (batch_size, length))


def _gpt(small: bool) -> nn.Sequential:
    sizes = (1000, 256, 8, 8, 256) if small else (50257, 768, 12, 12, 1024)
    return nn.Sequential(*gpt_stages(GPT(*sizes, tied=False)))


NETWORKS: dict[str, Network] = {
    "resnet50": Network(lambda _: nn.Sequential(*resnet_stages(models.resnet50())), images, (8, 112), (96, 224)),
    "resnet101": Network(lambda _: nn.Sequential(*resnet_stages(models.resnet101())), images, (4, 112), (64, 224)),
    "resnet152": Network(lambda _: nn.Sequential(*resnet_stages(models.resnet152())), images, (4, 112), (48, 224)),
    "vgg19": Network(lambda _: nn.Sequential(*vgg_stages(models.vgg19())), images, (4, 96), (64, 224)),
    "densenet121": Network(
        lambda _: nn.Sequential(*densenet_stages(models.densenet121())), images, (4, 128), (32, 224)
    ),
    "gpt": Network(_gpt, tokens, (4, 256), (8, 1024)),
}
