"""A network of pairs of a large operation and an in-place activation, which lose by being fused."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Pointwise(nn.Module):
    """A convolution of single pixels, as a product of matrices.

    A convolution's own kernel copies its operands, and that sets the lowest peak, whatever runs out of place.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ x.flatten(2)).unflatten(2, x.shape[2:])


def small_vgg(channels: int = 3) -> nn.Sequential:
    """Pairs of a convolution and an in-place ReLU, most of them large."""
    layers: list[nn.Module] = []
    for inputs in (channels, 16, 16, 16):
        layers += [Pointwise(inputs, 16), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)
