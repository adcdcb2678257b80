"""Pre-activation ResNet of K. He et al.: Identity Mappings in Deep Residual Networks, ECCV 2016 (arXiv:1603.05027)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

EXPANSION = 4


class PreactResNet(nn.Module):
    """Logits of shape (batch, num_classes) for images of shape (batch, 3, height, width), of bottleneck blocks.

    Args:
        blocks: bottleneck blocks of each stage; every stage but the first halves height and width.
        widths: channels inside the bottlenecks of each stage.
        stem: `"cifar"` is a 3 x 3 convolution at full resolution; `"imagenet"` a 7 x 7 convolution of stride 2 and a
            max pooling, which together reduce four times.
        stem_channels: channels of the first convolution.
        num_classes: length of the output.
    """

    def __init__(
        self, blocks: Sequence[int], widths: Sequence[int], stem: str, stem_channels: int, num_classes: int
    ) -> None:
        super().__init__()
        if stem not in ("cifar", "imagenet"):
            raise ValueError(f"stem must be 'cifar' or 'imagenet', not {stem!r}")
        if stem == "cifar":
            self.stem: nn.Module = nn.Conv2d(3, stem_channels, 3, padding=1, bias=False)
        else:
            self.stem = nn.Sequential(
                nn.Conv2d(3, stem_channels, 7, stride=2, padding=3, bias=False),
                nn.MaxPool2d(3, stride=2, padding=1),
            )
        channels = stem_channels
        stages: list[nn.Module] = []
        for stage, (depth, width) in enumerate(zip(blocks, widths, strict=True)):
            for block in range(depth):
                stride = 2 if block == 0 and stage > 0 else 1
                stages.append(_Bottleneck(channels, width, stride))
                channels = width * EXPANSION
        self.stages = nn.Sequential(*stages)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        values = self.relu(self.norm(self.stages(self.stem(images))))
        return self.head(torch.flatten(self.pool(values), 1))


class _Bottleneck(nn.Module):
    """Normalize and activate first; where the shape changes, the shortcut leaves behind the first activation."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * EXPANSION
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        same = in_channels == out_channels and stride == 1
        self.shortcut = None if same else nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        active = self.relu(self.norm1(values))
        skip = values if self.shortcut is None else self.shortcut(active)
        change = self.conv1(active)
        change = self.conv2(self.relu(self.norm2(change)))
        change = self.conv3(self.relu(self.norm3(change)))
        return skip + change


def cifar_resnet(depth: int = 1001, num_classes: int = 10, width: int = 16) -> PreactResNet:
    """The paper's CIFAR network of `depth` layers, 9n + 2 (164 and 1001 in its Table 4), for any image size.

    Raises:
        ValueError: `depth` is not 9n + 2 with n at least 1.
    """
    num_blocks, rest = divmod(depth - 2, 9)
    if rest or num_blocks < 1:
        low = 9 * max(1, num_blocks) + 2
        raise ValueError(f"depth {depth} is not 9n + 2; the nearest are {low} and {low + 9}")
    return PreactResNet((num_blocks,) * 3, (width, 2 * width, 4 * width), "cifar", width, num_classes)


def imagenet_resnet(blocks: Sequence[int] = (3, 24, 36, 3), num_classes: int = 1000, width: int = 64) -> PreactResNet:
    """The paper's ImageNet network, ResNet200 by default: depth is 3 times the number of blocks, plus 2."""
    return PreactResNet(blocks, [width * 2**stage for stage in range(len(blocks))], "imagenet", width, num_classes)
