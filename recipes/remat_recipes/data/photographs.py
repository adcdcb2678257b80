"""Real photographs that scikit-learn and scikit-image ship in their wheels: no download, known licences."""

from functools import cache

import numpy as np
import skimage.data
import torch
from sklearn.datasets import load_sample_image
from torch import Tensor

# Photographs of one part never appear in another, so that a test score is one on unseen backgrounds.
TRAIN = ("china.jpg", "astronaut", "coffee", "rocket", "hubble_deep_field", "retina", "grass", "brick", "coins")
VALIDATION = ("camera", "immunohistochemistry")
TEST = ("flower.jpg", "chelsea", "gravel", "moon")


@cache
def photograph(name: str) -> Tensor:
    """The named photograph as a `uint8` tensor of shape (3, height, width); grey ones have three equal channels."""
    pixels = load_sample_image(name) if name.endswith(".jpg") else getattr(skimage.data, name)()
    if pixels.ndim == 2:
        pixels = np.stack([pixels] * 3, axis=-1)
    channels_first = pixels[..., :3].transpose(2, 0, 1)
    return torch.from_numpy(channels_first.copy())  # some are read-only memory, which torch refuses
