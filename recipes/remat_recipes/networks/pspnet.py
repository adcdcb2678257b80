"""PSPNet of H. Zhao et al.: Pyramid Scene Parsing Network, CVPR 2017 (arXiv:1612.01105), on a dilated ResNet."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

RESNET101 = (3, 4, 23, 3)
EXPANSION = 4


class PSPNet(nn.Module):
    """Logits of shape (batch, num_classes, height, width) for images of shape (batch, 3, height, width).

    The backbone reduces eight times; the pyramid pools its output to 1, 2, 3 and 6 squared cells and joins what it
    enlarges again (paper, Figure 3). While training with `auxiliary`, the answer is a pair: the logits, and those of
    a head on the last stage but one (paper, section 3.3). The paper's size is 713 x 713 at 21 classes (VOC).
    Batch norm over the single cell of the pyramid needs at least two images a batch to train.

    Args:
        num_classes: channels of the output.
        layers: bottleneck blocks of the four stages; the paper's ResNet101 by default.
        width: channels inside the first stage's bottlenecks; every later stage has twice as many.
        bins: cells along one side of each level of the pyramid.
        auxiliary: add the auxiliary head.
        dropout: probability before the last convolution of each head.
    """

    def __init__(
        self,
        num_classes: int = 21,
        layers: Sequence[int] = RESNET101,
        width: int = 64,
        bins: Sequence[int] = (1, 2, 3, 6),
        auxiliary: bool = False,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _convolution(3, width, 3, stride=2),
            _convolution(width, width, 3),
            _convolution(width, 2 * width, 3),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        in_channels = 2 * width
        stages: list[nn.Module] = []
        for depth, stride, dilation, inner in zip(layers, (1, 2, 1, 1), (1, 1, 2, 4), (1, 2, 4, 8), strict=True):
            blocks: list[nn.Module] = []
            for block in range(depth):
                blocks.append(_Bottleneck(in_channels, inner * width, stride if block == 0 else 1, dilation))
                in_channels = inner * width * EXPANSION
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        level_channels = in_channels // len(bins)
        self.levels = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(cells), _convolution(in_channels, level_channels, 1)) for cells in bins
        )
        joined = in_channels + level_channels * len(bins)
        self.head = _head(joined, in_channels // EXPANSION, num_classes, dropout)
        self.auxiliary = (
            _head(in_channels // 2, in_channels // (2 * EXPANSION), num_classes, dropout) if auxiliary else None
        )

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        size = images.shape[2:]
        values = self.stem(images)
        for stage in self.stages[:-1]:
            values = stage(values)
        last = self.stages[-1](values)
        pyramid = [last, *(_enlarge(level(last), last.shape[2:]) for level in self.levels)]
        logits = _enlarge(self.head(torch.cat(pyramid, dim=1)), size)
        if self.auxiliary is not None and self.training:
            return logits, _enlarge(self.auxiliary(values), size)
        return logits


class _Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1, as torchvision's: the stride sits on the 3 x 3 convolution."""

    def __init__(self, in_channels: int, inner_channels: int, stride: int, dilation: int) -> None:
        super().__init__()
        out_channels = inner_channels * EXPANSION
        self.body = nn.Sequential(
            _convolution(in_channels, inner_channels, 1),
            _convolution(inner_channels, inner_channels, 3, stride=stride, dilation=dilation),
            _convolution(inner_channels, out_channels, 1, relu=False),
        )
        same = in_channels == out_channels and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(in_channels, out_channels, 1, stride=stride, relu=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, values: Tensor) -> Tensor:
        return self.relu(self.body(values) + self.shortcut(values))


def _convolution(
    in_channels: int, out_channels: int, size: int, *, stride: int = 1, dilation: int = 1, relu: bool = True
) -> nn.Sequential:
    padding = dilation * (size // 2)
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, out_channels, size, stride, padding, dilation, bias=False),
        nn.BatchNorm2d(out_channels),
    ]
    if relu:
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


def _head(in_channels: int, inner_channels: int, num_classes: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        _convolution(in_channels, inner_channels, 3), nn.Dropout2d(dropout), nn.Conv2d(inner_channels, num_classes, 1)
    )


def _enlarge(values: Tensor, size: Sequence[int]) -> Tensor:
    """Corners stay corners, as in the paper's code: 713 = 8 * 89 + 1 pixels lie on 90 cells."""
    return functional.interpolate(values, size, mode="bilinear", align_corners=True)
