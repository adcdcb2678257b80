"""U-Net of O. Ronneberger, P. Fischer, T. Brox: U-Net, MICCAI 2015 (arXiv:1505.04597), Figure 1."""

from itertools import pairwise

import torch
from torch import Tensor, nn


class UNet(nn.Module):
    """Logits of shape (batch, num_classes, height', width') for images of shape (batch, in_channels, height, width).

    As published (the defaults), convolutions are unpadded: 572 x 572 pixels give 388 x 388, each skip is cropped to
    the size that it meets, and height and width minus 124 must be multiples of 16 (at `num_levels` 4).
    With `padded` the output has the size of the input, which must be a multiple of 16.

    Args:
        in_channels: of the images.
        num_classes: channels of the output.
        width: channels of the first level; every level down has twice as many.
        num_levels: poolings, and up-convolutions.
        padded: keep the size in every convolution.
        batch_norm: normalize behind every 3 x 3 convolution (not in the paper; learns faster from scratch).
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 2,
        width: int = 64,
        num_levels: int = 4,
        padded: bool = False,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(num_levels + 1)]
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(
            _convolutions(inner, outer, padded, batch_norm) for inner, outer in pairwise([in_channels, *widths])
        )
        upwards = list(pairwise(reversed(widths)))
        self.up_convolutions = nn.ModuleList(nn.ConvTranspose2d(inner, outer, 2, stride=2) for inner, outer in upwards)
        self.up = nn.ModuleList(_convolutions(inner, outer, padded, batch_norm) for inner, outer in upwards)
        self.head = nn.Conv2d(width, num_classes, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # paper, section 3: a Gaussian of deviation sqrt(2 / N)
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        *skipped, values = self._descend(images)
        for up_convolution, convolutions, skip in zip(self.up_convolutions, self.up, reversed(skipped), strict=True):
            risen = up_convolution(values)
            values = convolutions(torch.cat([_crop(skip, risen), risen], dim=1))
        return self.head(values)

    def _descend(self, values: Tensor) -> list[Tensor]:
        """The outputs of all levels, from the finest to the coarsest."""
        outputs = [self.down[0](values)]
        for convolutions in self.down[1:]:
            outputs.append(convolutions(self.pool(outputs[-1])))
        return outputs


def _convolutions(in_channels: int, out_channels: int, padded: bool, batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (in_channels, out_channels):
        layers.append(nn.Conv2d(channels, out_channels, 3, padding=1 if padded else 0, bias=not batch_norm))
        if batch_norm:
            layers.append(nn.BatchNorm2d(out_channels))
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


def _crop(values: Tensor, like: Tensor) -> Tensor:
    """The middle of `values`, a view as high and wide as `like`."""
    top = (values.shape[2] - like.shape[2]) // 2
    left = (values.shape[3] - like.shape[3]) // 2
    return values[:, :, top : top + like.shape[2], left : left + like.shape[3]]
