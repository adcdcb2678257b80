"""The recipes' data: exact labels, disjoint parts, repeatable samples, and a batch size that can be changed."""

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from remat_recipes.data.digits import Digits
from remat_recipes.data.oxford_pet import OxfordPet
from remat_recipes.data.photographs import TEST, TRAIN, VALIDATION, photograph
from remat_recipes.data.scenes import INK, Scenes
from remat_recipes.data.synthetic import RandomDataset, Synthetic
from remat_recipes.data.text import UNKNOWN, Text
from remat_recipes.data.voc import Voc


def ready(data):
    data.prepare_data()
    data.setup("fit")
    return data


def test_digits_are_those_of_scikit_learn_split_without_overlap():
    data = ready(Digits(image_size=8, channels=1))
    parts = [data.train_set, data.validation_set, data.test_set]
    assert [len(part) for part in parts] == [1257, 180, 360]
    samples = [sample for part in parts for sample in part]
    pixels = torch.stack([image for image, _ in samples]).flatten(1).double().numpy()
    labels = torch.stack([label for _, label in samples]).numpy()
    originals, classes = load_digits(return_X_y=True)
    scale, shift = np.polyfit([pixels.min(), pixels.max()], [0, 16], 1)
    found = sorted(
        (*np.rint(row * scale + shift).astype(int), label) for row, label in zip(pixels, labels, strict=True)
    )
    assert found == sorted((*row.astype(int), label) for row, label in zip(originals, classes, strict=True))


def test_digits_enlarge_and_repeat_channels():
    images, _ = next(iter(ready(Digits(batch_size=5, image_size=20, channels=3)).train_dataloader()))
    assert images.shape == (5, 3, 20, 20)
    assert torch.equal(images[:, 0], images[:, 2])


def test_training_digits_move_and_test_digits_do_not():
    still, moving = ready(Digits(image_size=12)), ready(Digits(image_size=12, shift=2))
    torch.manual_seed(0)
    offsets = set()
    for _ in range(200):
        image, label = moving.train_set[5]
        original, same = still.train_set[5]
        assert label == same
        offsets |= {
            (dy, dx)
            for dy in range(-2, 3)
            for dx in range(-2, 3)
            if torch.equal(image[:, 2:-2, 2:-2], original[:, 2 + dy : 10 + dy, 2 + dx : 10 + dx])
        }
    assert offsets == {(dy, dx) for dy in range(-2, 3) for dx in range(-2, 3)}
    assert all(torch.equal(moving.test_set[i][0], still.test_set[i][0]) for i in range(20))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "data",
    [
        Digits(batch_size=4),
        Scenes(batch_size=4, num_train=64, image_size=16),
        Text(batch_size=4, sequence_length=8),
        Synthetic((3, 8, 8), 5, batch_size=4),
    ],
    ids=lambda data: type(data).__name__,
)
def test_batch_size_can_be_changed_after_setup(data):
    ready(data).batch_size = 7
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        inputs, targets = next(iter(loader))
        assert len(inputs) == len(targets) == 7
    assert {len(inputs) for inputs, _ in data.train_dataloader()} == {7}, "the remainder is dropped in training"
    data.batch_size = 100_000
    assert len(list(data.train_dataloader())) == 1, "but never the whole data set"


@pytest.mark.slow
def test_photographs_are_real_bundled_and_in_one_part_only():
    names = TRAIN + VALIDATION + TEST
    assert len(set(names)) == len(names)
    for name in names:
        picture = photograph(name)
        assert picture.dtype == torch.uint8
        assert picture.shape[0] == 3
        assert min(picture.shape[1:]) >= 300
        assert len(picture.unique()) > 100


@pytest.mark.slow
@pytest.mark.parametrize("image_size", [16, 61, 200])
def test_scenes_are_repeatable_and_of_any_size(image_size):
    first, again = (ready(Scenes(image_size=image_size, num_train=8)) for _ in range(2))
    for index in range(8):
        image, labels = first.train_set[index]
        assert image.shape == (3, image_size, image_size)
        assert labels.shape == (image_size, image_size)
        assert torch.equal(image, again.train_set[index][0])
        assert torch.equal(labels, again.train_set[index][1])
    assert not torch.equal(first.train_set[0][0], first.train_set[1][0])
    assert not torch.equal(first.train_set[0][0], first.test_set[0][0])
    with pytest.raises(IndexError):
        first.train_set[8]


def test_scene_labels_are_exact():
    """Pasted at an eighth of the resolution on a flat ground, a digit's labels are the pixels that it covers."""
    scenes = ready(Scenes(image_size=32, num_train=4)).train_set
    random = np.random.default_rng(0)
    flat, labels = torch.full((3, 32, 32), 0.9), torch.zeros(32, 32, dtype=torch.long)
    scenes.digits, scenes.classes = scenes.digits[3:4], scenes.classes[3:4]
    scenes._paste(random, flat, labels)
    covered = (0.9 - flat[0]) / (0.9 - flat[0].min())
    strongest = scenes.digits.max()
    assert set(labels.unique().tolist()) == {0, int(scenes.classes[0]) + 1}
    clear = (covered * strongest - INK).abs() > 0.1
    assert torch.equal((labels > 0)[clear], (covered * strongest > INK)[clear])


def test_scenes_hold_every_class():
    data = ready(Scenes(num_train=64))
    present = torch.stack([labels for _, labels in data.train_set]).unique()
    assert present.tolist() == list(range(11))
    few = ready(Scenes(num_train=16, kinds=(7, 0)))
    assert torch.stack([labels for _, labels in few.train_set]).unique().tolist() == [0, 1, 2]
    sevens = few.train_set.digits[few.train_set.classes == 0]
    originals, names = load_digits(return_X_y=True)
    found = {tuple(seven.flatten().mul(16).round().int().tolist()) for seven in sevens}
    assert found <= {tuple(map(int, image)) for image in originals[names == 7]}


@pytest.mark.parametrize(("level", "joint"), [("character", ""), ("word", " ")])
def test_text_targets_are_the_inputs_one_token_later(level, joint):
    data = ready(Text(level=level, vocabulary_size=5000, sequence_length=16))
    inputs, targets = data.train_set.tensors
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs[1:, 0], targets[:-1, -1])
    assert inputs.max() < 5000
    words = {number: token for token, number in data.vocabulary.items()}
    assert "statement" in joint.join(words.get(number, "?") for number in inputs.flatten().tolist())


def test_text_keeps_the_most_frequent_tokens():
    inputs, _ = ready(Text(vocabulary_size=10)).train_set.tensors
    counts = torch.bincount(inputs.flatten(), minlength=10)
    assert len(counts) == 10
    assert counts[UNKNOWN] > 0
    known = counts[UNKNOWN + 1 :]
    assert known[0] == known.max()
    assert known.min() > 0
    with pytest.raises(ValueError, match="level"):
        Text(level="sentence")


@pytest.mark.parametrize(
    ("shape", "target", "target_shape"),
    [((3, 8, 6), "class", ()), ((3, 8, 6), "pixels", (8, 6)), ((9,), "tokens", (9,))],
)
def test_synthetic_targets(shape, target, target_shape):
    samples = RandomDataset(shape, 4, target, 3, seed=1)
    inputs, targets = samples[2]
    assert inputs.shape == shape
    assert targets.shape == target_shape
    assert targets.max() < 4
    assert torch.equal(inputs, samples[2][0])
    assert not torch.equal(inputs, samples[1][0])
    if target == "tokens":
        assert torch.equal(inputs[1:], targets[:-1])
    with pytest.raises(ValueError, match="target"):
        RandomDataset(shape, 4, "boxes", 3, seed=1)


def write_pictures(folder, suffix, colours):
    folder.mkdir(parents=True)
    for number, colour in enumerate(colours):
        picture = Image.new("L" if isinstance(colour, int) else "RGB", (40, 30), colour)
        picture.putpixel(
            (39, 29), 255 if isinstance(colour, int) and suffix == "png" and "Seg" in folder.name else colour
        )
        picture.save(folder / f"{number}.{suffix}")


def test_voc_reads_the_layout_on_disk(tmp_path):
    voc = tmp_path / "VOCdevkit" / "VOC2012"
    write_pictures(voc / "JPEGImages", "jpg", [(200, 10, 10)] * 20)
    write_pictures(voc / "SegmentationClass", "png", [7] * 20)
    splits = voc / "ImageSets" / "Segmentation"
    splits.mkdir(parents=True)
    (splits / "train.txt").write_text("\n".join(map(str, range(20))))
    (splits / "val.txt").write_text("3\n4")
    data = ready(Voc(root=tmp_path, image_size=24, batch_size=2))
    assert [len(part) for part in (data.train_set, data.validation_set, data.test_set)] == [18, 2, 2]
    for loader in (data.train_dataloader(), data.test_dataloader()):
        images, labels = next(iter(loader))
        assert images.shape == (2, 3, 24, 24)
        assert images.dtype == torch.float32
        assert labels.dtype == torch.long
        assert set(labels.unique().tolist()) <= {7, 255}
        assert (labels == 7).any()


def test_voc_says_how_to_get_what_is_missing(tmp_path):
    with pytest.raises(RuntimeError, match="download=True"):
        Voc(root=tmp_path).prepare_data()


def test_oxford_pet_counts_classes_from_zero(tmp_path):
    pets = tmp_path / "oxford-iiit-pet"
    write_pictures(pets / "images", "jpg", [(10, 200, 10)] * 20)
    write_pictures(pets / "annotations" / "trimaps", "png", [1, 2, 3, 1, 2] * 4)
    lines = "\n".join(f"{number} 1 1 1" for number in range(20))
    (pets / "annotations" / "trainval.txt").write_text(lines)
    (pets / "annotations" / "test.txt").write_text("1 1 1 1\n2 1 1 1")
    data = ready(OxfordPet(root=tmp_path, image_size=16, batch_size=2))
    assert [len(part) for part in (data.train_set, data.validation_set, data.test_set)] == [18, 2, 2]
    images, labels = next(iter(data.test_dataloader()))
    assert images.shape == (2, 3, 16, 16)
    assert labels[0].unique().tolist() == [1]
    assert labels[1].unique().tolist() == [2]
