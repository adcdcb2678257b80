"""What a network of the zoo is, and inputs that many share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Architecture:
    """One network and the arguments of a step of it.

    Attributes:
        source: The library that it comes from, which is imported when the network is built.
        name: Its name there.
        build: Makes it, untrained, in training mode.
        arguments: Makes the positional and keyword arguments of a call.
    """

    source: str
    name: str
    build: Callable[[], nn.Module]
    arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


def images(batch_size: int, extent: int, channels: int = 3) -> Tensor:
    """Random images."""
    return torch.randn(batch_size, channels, extent, extent)


def tokens(batch_size: int, length: int, vocabulary: int = 100) -> Tensor:
    """Random token numbers, of which none is a special token of the small configurations."""
    return torch.randint(5, vocabulary, (batch_size, length))


def on_images(batch_size: int, extent: int) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of a network that takes a batch of colour images alone."""
    return lambda: ((images(batch_size, extent),), {})
