"""Networks of torchvision, timm, segmentation_models_pytorch and transformers, and LSTMs, untrained, with inputs.

The libraries are imported when a network of theirs is built; weights are never downloaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .lstm import LSTM


@dataclass(frozen=True)
class Architecture:
    """One network and the sizes at which it is tried.

    Attributes:
        source: The library that it comes from.
        name: Its name there.
        build: Makes it, in training mode.
        inputs: Its input for a batch size and an extent (pixels, tokens).
        small: Batch size and extent of a step that is really computed.
        large: Those of a step on fake tensors, as papers train.
    """

    source: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Tensor]
    small: tuple[int, int]
    large: tuple[int, int]


def images(batch_size: int, extent: int) -> Tensor:
    """Random colour images."""
    return torch.randn(batch_size, 3, extent, extent)


def tokens(batch_size: int, length: int) -> Tensor:
    """Random token numbers."""
    return torch.randint(0, 1000, (batch_size, length))


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


def _torchvision(name: str) -> Architecture:
    def build() -> nn.Module:
        models = importlib.import_module("torchvision").models
        options = {"weights_backbone": None} if name in vars(models.segmentation) else {}
        options |= {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        return models.get_model(name, weights=None, **options)

    extent = 299 if name == "inception_v3" else 224 if name.startswith(("maxvit", "vit")) else 64
    return Architecture("torchvision", name, build, images, (2, extent), (32, max(extent, 224)))


def _timm(name: str, small: tuple[int, int] = (2, 64)) -> Architecture:
    def build() -> nn.Module:
        return importlib.import_module("timm").create_model(name, pretrained=False)

    return Architecture("timm", name, build, images, small, (32, 224))


def _smp(name: str) -> Architecture:
    def build() -> nn.Module:
        library = importlib.import_module("segmentation_models_pytorch")
        return getattr(library, name)(encoder_name="resnet18", encoder_weights=None)

    return Architecture("segmentation_models_pytorch", name, build, images, (2, 64), (32, 224))


def _transformers(
    model: str,
    config: str,
    options: dict[str, Any],
    inputs: Callable[[int, int], Tensor],
    small: tuple[int, int],
    large: tuple[int, int],
) -> Architecture:
    def build() -> nn.Module:
        library = importlib.import_module("transformers")
        return getattr(library, model)(getattr(library, config)(**options)).train()

    return Architecture("transformers", model, build, inputs, small, large)


TORCHVISION = (
    "alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet1_0 "
    "mobilenet_v2 mobilenet_v3_small regnet_y_400mf resnet18 resnext50_32x4d wide_resnet50_2 shufflenet_v2_x1_0 "
    "squeezenet1_1 swin_t swin_v2_t vgg11_bn vit_b_16 deeplabv3_resnet50 fcn_resnet50 lraspp_mobilenet_v3_large"
)
"""One member of every family for classification and segmentation."""

TIMM = (
    "resnet50d convnextv2_atto mobilenetv3_small_100 regnety_004 eca_nfnet_l0 res2net50_26w_4s edgenext_xx_small "
    "hrnet_w18_small repvgg_a0 tf_efficientnetv2_b0 ghostnet_100 skresnet18 poolformer_s12 dpn68 mobilevit_xxs"
)
TIMM_OF_ONE_SIZE = "vit_tiny_patch16_224 xcit_nano_12_p16_224 coatnet_0_rw_224 levit_128s"

ARCHITECTURES = (
    *map(_torchvision, TORCHVISION.split()),
    *map(_timm, TIMM.split()),
    *(_timm(name, (2, 224)) for name in TIMM_OF_ONE_SIZE.split()),
    # Where parameters and their gradients set the lowest peak of a small step, it takes more samples or tokens.
    _timm("mixer_s32_224", (8, 224)),
    _timm("inception_v4", (2, 96)),
    *map(_smp, ("Unet", "FPN", "PSPNet", "DeepLabV3Plus")),
    _transformers("GPT2LMHeadModel", "GPT2Config", {"n_layer": 6, "use_cache": False}, tokens, (8, 64), (32, 256)),
    _transformers("ViTForImageClassification", "ViTConfig", {}, images, (2, 224), (32, 224)),
    _transformers("BertForSequenceClassification", "BertConfig", {"num_hidden_layers": 6}, tokens, (16, 64), (32, 256)),
    Architecture("recipes", "LSTM (unrolled)", lambda: LSTM(hidden_size=256, num_steps=16), tokens, (2, 16), (64, 16)),
    Architecture("torch", "nn.LSTM", StackedLSTM, tokens, (32, 64), (64, 256)),
)
