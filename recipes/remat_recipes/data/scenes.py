"""Scenes: real digits pasted on crops of real photographs, with exact labels for every pixel, at any size."""

from collections.abc import Sequence

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from remat_recipes.data.loaders import evaluation_loader, training_loader
from remat_recipes.data.photographs import TEST, TRAIN, VALIDATION, photograph

INK = 0.5  # a pixel belongs to a digit where the digit covers more than this part of it


class SceneDataset(Dataset[tuple[Tensor, Tensor]]):
    """Scene number `i` is a function of the arguments and `i` alone: any worker, any epoch, any resume gives the same.

    Args:
        photographs: names of the backgrounds.
        digits: intensities in [0, 1], shape (n, 8, 8).
        classes: of the digits, from 0, shape (n,); in the labels the background is 0 and class k is k + 1.
        image_size: side of a scene in pixels.
        num_scenes: length of the data set.
        channels: 3, or 1 for grey scenes.
        seed: of the scenes.
    """

    def __init__(
        self,
        photographs: tuple[str, ...],
        digits: Tensor,
        classes: Tensor,
        *,
        image_size: int,
        num_scenes: int,
        channels: int,
        seed: int,
    ) -> None:
        self.photographs = photographs
        self.digits = digits
        self.classes = classes
        self.image_size = image_size
        self.num_scenes = num_scenes
        self.channels = channels
        self.seed = seed

    def __len__(self) -> int:
        return self.num_scenes

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Image of shape (channels, size, size), roughly in [-2, 2], and labels of shape (size, size)."""
        if not 0 <= index < self.num_scenes:
            raise IndexError(f"scene {index} of {self.num_scenes}")
        random = np.random.default_rng((self.seed, index))
        scene = self._background(random)
        labels = torch.zeros(self.image_size, self.image_size, dtype=torch.long)
        for _ in range(random.integers(1, 5)):
            self._paste(random, scene, labels)
        scene = (scene - 0.5) / 0.25
        return (scene.mean(0, keepdim=True) if self.channels == 1 else scene), labels

    def _background(self, random: np.random.Generator) -> Tensor:
        picture = photograph(self.photographs[random.integers(len(self.photographs))])
        _, height, width = picture.shape
        side = int(random.integers(min(height, width) // 4, min(height, width) + 1))
        top, left = random.integers(height - side + 1), random.integers(width - side + 1)
        crop = picture[:, top : top + side, left : left + side]
        return _resize(crop, self.image_size).float() / 255  # bytes are resized three times as fast as floats

    def _paste(self, random: np.random.Generator, scene: Tensor, labels: Tensor) -> None:
        """Draw one digit into `scene` and `labels`, over whatever was there, in a colour that stands out."""
        which = random.integers(len(self.digits))
        side = int(random.integers(self.image_size // 3, self.image_size // 2 + 1))
        top, left = random.integers(self.image_size - side + 1, size=2)
        window = (slice(top, top + side), slice(left, left + side))
        cover = _resize(self.digits[which][None], side)
        under = scene[:, *window]
        shade = random.uniform(0.0, 0.25, size=3)
        colour = torch.tensor(shade if under.mean() > 0.5 else 1 - shade, dtype=scene.dtype)[:, None, None]
        scene[:, *window] = under + cover * (colour - under)
        labels[window][cover[0] > INK] = self.classes[which] + 1


class Scenes(LightningDataModule):
    """Segmentation into background and digits; parts share neither a digit image nor a photograph.

    Args:
        batch_size: samples a batch; read whenever a loader is made.
        image_size: side of the scenes in pixels.
        kinds: the digits that occur; the first is class 1, and class 0 is the background.
        num_train: scenes to train on; validation and test have a quarter of that each.
        channels: 3, or 1 for grey scenes.
        num_workers: worker processes a loader.
        seed: of the scenes.
    """

    def __init__(
        self,
        batch_size: int = 16,
        image_size: int = 64,
        kinds: Sequence[int] = tuple(range(10)),
        num_train: int = 1024,
        channels: int = 3,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.image_size = image_size
        self.kinds = tuple(kinds)
        self.num_train = num_train
        self.channels = channels
        self.num_workers = num_workers
        self.seed = seed

    def setup(self, stage: str) -> None:
        pixels, classes = load_digits(return_X_y=True)
        digits = torch.from_numpy(pixels).float().reshape(-1, 8, 8) / 16
        order = np.random.default_rng(self.seed).permutation(len(classes))
        kind_of = {kind: number for number, kind in enumerate(self.kinds)}

        def part(number: int, photographs: tuple[str, ...], chosen: np.ndarray, num_scenes: int) -> SceneDataset:
            wanted = [int(index) for index in chosen if classes[index] in kind_of]
            return SceneDataset(
                photographs,
                digits[wanted],
                torch.tensor([kind_of[classes[index]] for index in wanted]),
                image_size=self.image_size,
                num_scenes=num_scenes,
                channels=self.channels,
                seed=3 * self.seed + number,
            )

        quarter = max(1, self.num_train // 4)
        self.train_set = part(0, TRAIN, order[:1257], self.num_train)
        self.validation_set = part(1, VALIDATION, order[1257:1437], quarter)
        self.test_set = part(2, TEST, order[1437:], quarter)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return training_loader(self.train_set, self.batch_size, self.num_workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return evaluation_loader(self.validation_set, self.batch_size, self.num_workers)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return evaluation_loader(self.test_set, self.batch_size, self.num_workers)


def _resize(image: Tensor, side: int) -> Tensor:
    """`image` of shape (channels, height, width) at `side` x `side` pixels, bilinearly, without aliasing."""
    return functional.interpolate(image[None], (side, side), mode="bilinear", align_corners=False, antialias=True)[0]
