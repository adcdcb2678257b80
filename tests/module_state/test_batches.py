"""Batches of any kind: where their tensors are found, and copies that may be taken apart."""

from __future__ import annotations

import threading
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision import tv_tensors

from lightning_remat.batch_search.resizing import batch_size_of, resized
from lightning_remat.module_state.batches import as_new, detached, tensors_held
from lightning_remat.module_state.nesting import flatten, tensors_in


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


@dataclass
class Record:
    x: Any
    y: Any


class Named(dict[str, Any]):
    """A dictionary of a class of its own."""


def graph(x: Any, y: Any) -> SimpleNamespace:
    """An object that its own parts refer to, as graphs do."""
    made = SimpleNamespace(store={"x": x})
    made.parts = [SimpleNamespace(parent=made, y=y)]
    return made


KINDS = [
    lambda x, y: (x, y),
    lambda x, y: [x, {"y": y}],
    lambda x, y: OrderedDict(x=x, y=y),
    lambda x, y: UserDict(x=x, y=y),
    lambda x, y: Named(x=x, inner=UserDict(y=y)),
    Record,
    Slotted,
    graph,
    lambda x, y: (Slotted(x, "a word"), [Record(1, y)]),
]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_found_once_wherever_they_are(kind: Any) -> None:
    x, y = torch.zeros(2), torch.ones(3)
    assert {id(t) for t in tensors_held([kind(x, y), x])} == {id(x), id(y)}
    assert len(tensors_held([kind(x, y), x])) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_has_the_very_tensors(kind: Any) -> None:
    batch = kind(torch.zeros(2), torch.ones(3))
    copied = as_new(batch)
    assert copied is not batch
    assert type(copied) is type(batch)
    assert [*map(id, tensors_held(copied))] == [*map(id, tensors_held(batch))]


def test_a_set_is_looked_into() -> None:
    x, y = torch.zeros(2), torch.ones(3)
    copied = as_new(SimpleNamespace(parts={x, y}))
    assert copied.parts == {x, y}
    assert {*tensors_held(copied)} == {x, y}


def test_what_is_done_to_a_copy_is_not_done_to_the_batch() -> None:
    x, y = torch.zeros(2), torch.ones(3)
    batch = {"user": UserDict(x=x, y=y), "graph": graph(x, y), "list": [x, y]}
    copied = as_new(batch)
    copied["user"].pop("y")
    copied["graph"].parts[0].y = None
    copied["graph"].store.clear()
    copied["list"].append(x)
    del copied["graph"]
    assert [*batch["user"]] == ["x", "y"]
    assert batch["graph"].parts[0].y is y
    assert batch["graph"].store == {"x": x}
    assert len(batch["list"]) == 2


def test_what_is_no_part_of_a_batch_is_neither_looked_into_nor_copied() -> None:
    net, x = nn.Linear(2, 2), torch.zeros(2)
    batch = SimpleNamespace(x=x, net=net)
    assert tensors_held(batch) == [x]
    assert as_new(batch).net is net


def test_what_cannot_be_copied_is_handed_out() -> None:
    batch = SimpleNamespace(x=torch.zeros(2), lock=threading.Lock())
    assert as_new(batch) is batch


class Frozen(dict[str, Any]):
    """A dictionary that does not change."""

    def clear(self) -> None:
        raise TypeError("it is frozen")


def test_a_frozen_dictionary_stays_whole() -> None:
    batch = Frozen(x=torch.zeros(2))
    leaves, structure = flatten([batch])
    assert structure.build(leaves) == [batch]
    assert tensors_held(batch) == [batch["x"]]


def test_the_fields_of_a_record_are_no_samples() -> None:
    batch = Record(torch.zeros(2, 4), torch.ones(2, 3))
    assert resized(batch, 5).x.shape == (5, 4)


@pytest.mark.parametrize("kind", [UserDict, Named])
def test_dictionaries_of_any_class_are_taken_apart_and_made_again(kind: Any) -> None:
    batch = kind(x=torch.arange(6).view(3, 2), name="a", inner=kind(y=torch.ones(3)))
    leaves, structure = flatten(batch)
    assert [type(leaf) for leaf in leaves] == [Tensor, str, Tensor]
    assert structure.build(leaves) == batch
    assert type(structure.build(leaves)["inner"]) is kind
    assert len(tensors_in(batch)) == 2
    assert batch_size_of(batch) == 3
    assert resized(batch, 5)["x"].shape == (5, 2)
    assert resized(batch, 5)["inner"]["y"].shape == (5,)


def test_tensors_cut_from_their_history_are_of_their_classes_with_their_attributes() -> None:
    marked: Any = torch.rand(2, requires_grad=True) * 2
    marked.weight = 0.5
    boxes = tv_tensors.BoundingBoxes(torch.rand(3, 4), format="XYXY", canvas_size=(8, 9))
    cut, again = detached([marked, boxes])
    assert (cut.weight, cut.requires_grad, cut.is_leaf) == (0.5, True, True)
    assert type(again) is tv_tensors.BoundingBoxes
    assert (again.format, again.canvas_size) == (boxes.format, boxes.canvas_size)
