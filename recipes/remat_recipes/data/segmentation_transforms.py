"""Transforms of an image together with the mask of its labels, for torchvision's segmentation data sets."""

from collections.abc import Callable

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2
from torchvision.tv_tensors import Mask

Transform = Callable[[Image.Image, Image.Image], tuple[Tensor, Tensor]]


def image_and_mask(image_size: int, *, vary: bool, first_label: int = 0) -> Transform:
    """A function (image, mask) -> (float tensor (3, s, s), labels (s, s)), `transforms=` of a torchvision data set.

    Args:
        image_size: side s in pixels; masks are resized to the nearest label, never to a mean of two.
        vary: crop and flip at random, image and mask alike.
        first_label: the number that the mask gives to class 0.
    """
    size = (image_size, image_size)
    steps = [v2.RandomResizedCrop(size, scale=(0.5, 1.0)), v2.RandomHorizontalFlip()] if vary else [v2.Resize(size)]
    change = v2.Compose(steps)
    normalize = v2.Compose(
        [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
    )

    def transform(image: Image.Image, mask: Image.Image) -> tuple[Tensor, Tensor]:
        picture, labels = change(v2.functional.to_image(image), Mask(v2.functional.pil_to_tensor(mask)))
        return normalize(picture).as_subclass(Tensor), labels[0].as_subclass(Tensor).long() - first_label

    return transform
