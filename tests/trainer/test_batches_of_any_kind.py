"""Training steps that take their batch apart, and batches of any kind: planned, and trained as without a plan."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from remat_runs import Classifier, Peaks, Reader, run, seeded, texts
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_remat import Rematerialization

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
]


class Graph:
    """A batch as PyTorch Geometric has it: an object that parts of it refer to, which knows how to move."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.store = SimpleNamespace(graph=self, x=x)
        self.y = y

    def to(self, *args: Any, **kwargs: Any) -> Graph:
        self.store.x, self.y = self.store.x.to(*args, **kwargs), self.y.to(*args, **kwargs)
        return self


KINDS = {
    "dictionary": lambda x, y: {"x": x, "y": y},
    "list": lambda x, y: [x, y],
    "tokens": lambda x, y: UserDict(x=x, y=y),
    "graph": Graph,
}


class Texts(Classifier):
    """Texts of these lengths, with labels that count from one.

    Attributes:
        kind: Of the batches.
        step: What is done to a batch before texts and labels are taken from it.
    """

    def __init__(self, lengths: tuple[int, ...], kind: str, step: Any) -> None:
        super().__init__(texts())
        self.lengths, self.kind, self.step = lengths, KINDS[kind], step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.step(self, batch)
        return functional.cross_entropy(self.net(x).transpose(1, 2), y)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        data = [torch.randint(30, (length,), generator=generator) for length in self.lengths for _ in range(4)]
        return DataLoader(data, 4, collate_fn=self.collated)  # pyright: ignore

    def collated(self, samples: list[Tensor]) -> Any:
        x = torch.stack(samples)
        return self.kind(x, x + 1)

    optimizer_zero_grad = Reader.optimizer_zero_grad


def popped(module: Texts, batch: Any) -> tuple[Tensor, Tensor]:
    y = batch.pop("y") - 1
    return batch["x"], y


def popped_from_list(module: Texts, batch: Any) -> tuple[Tensor, Tensor]:
    y = batch.pop() - 1
    return batch.pop(), y


def put_in(module: Texts, batch: Any) -> tuple[Tensor, Tensor]:
    assert "y0" not in batch
    batch["y0"] = batch["y"] - 1
    return batch["x"], batch["y0"]


def written(module: Texts, batch: Any) -> tuple[Tensor, Tensor]:
    batch["y"] -= 1
    return batch["x"], batch["y"]


def written_in_graph(module: Texts, batch: Any) -> tuple[Tensor, Tensor]:
    batch.y -= 1
    return batch.store.x, batch.y


def exchanged_in_graph(module: Texts, batch: Any) -> tuple[Tensor, Tensor]:
    batch.y, batch.store.x = batch.y - 1, batch.store.x.clone()
    return batch.store.graph.store.x, batch.y


CASES = [
    ("dictionary", popped), ("dictionary", put_in), ("dictionary", written), ("list", popped_from_list),
    ("tokens", popped), ("tokens", put_in), ("tokens", written), ("graph", written_in_graph),
    ("graph", exchanged_in_graph),
]  # fmt: skip


@pytest.mark.filterwarnings("error:.*Rematerialization.*")
@pytest.mark.parametrize(("kind", "step"), CASES)
def test_a_step_may_take_its_batch_apart(tmp_path: Path, kind: str, step: Any) -> None:
    lengths = (40, 20, 80, 30)
    probe = Rematerialization("periodic", memory_budget="100%", batch_size="keep")
    run(tmp_path, seeded(Texts, lengths=(80, 80), kind=kind, step=step), probe, max_epochs=1, max_steps=-1)
    assert probe.result is not None
    budget = probe.result.plain_peak_bytes * 3 // 4
    logger, callback = Peaks(), Rematerialization("periodic", memory_budget=budget, batch_size="keep")
    ours = seeded(Texts, lengths=lengths, kind=kind, step=step)
    run(tmp_path, ours, callback, logger=logger, max_epochs=1, max_steps=-1)
    assert callback.result is not None
    assert callback.result.plan.num_recomputed > 0, "the larger batch is planned anew"
    assert max(logger.peaks) <= budget
    plain = seeded(Texts, lengths=lengths, kind=kind, step=step)
    run(tmp_path, plain, max_epochs=1, max_steps=-1)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_batch_size_of_what_a_tokenizer_returns_is_searched(tmp_path: Path) -> None:
    callback = Rematerialization("periodic", memory_budget="1MiB", max_batch_size=16)
    run(tmp_path, seeded(Texts, lengths=(40,) * 8, kind="tokens", step=popped), callback, max_steps=1)
    assert callback.result is not None
    assert callback.result.batch_size == 16
