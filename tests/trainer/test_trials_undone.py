"""Trial steps leave nothing behind, whatever a step changes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from same_runs import BATCH, Deep, Manual, assert_same_run, remat
from torch import Tensor
from torchmetrics import MeanMetric

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]
SEARCH: dict[str, Any] = {"batch_size": "auto", "min_batch_size": BATCH, "max_batch_size": BATCH}


class Scheduled(Manual):
    """Steps a schedule by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        schedule: Any = self.lr_schedulers()
        schedule.step()
        self.seen.append(schedule.last_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Stopping(Deep):
    """Asks the trainer to stop after some steps."""

    count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        if self.count >= 3:
            self.trainer.should_stop = True
        self.seen.append(self.count)
        return super().training_step(batch, batch_idx)


class Replay:
    """A buffer of what was seen, with a generator of its own."""

    __slots__ = ("generator", "items", "total")

    def __init__(self) -> None:
        self.items: deque[Tensor] = deque(maxlen=5)
        self.total = np.zeros(2)
        self.generator = np.random.default_rng(0)

    def add(self, item: Tensor) -> Tensor:
        self.items.append(item)
        self.total += self.generator.random(2)
        return self.items[int(self.generator.integers(len(self.items)))]


class Replaying(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.buffer = Replay()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        old = self.buffer.add(batch[0].detach())
        self.seen = [len(self.buffer.items), self.buffer.total.tolist(), old.sum().item()]
        return super().training_step([batch[0] + 0.1 * old], batch_idx)


class Measuring(Deep):
    """Metrics in a dict, which no module registers."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = {"mean": MeanMetric()}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.metrics["mean"].update(loss.detach())
        self.seen.append(self.metrics["mean"].compute().item())
        return loss


class Average:
    """Follows the weights, outside of every module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.copy = [deepcopy(module)]
        self.shadow = {n: p.detach().clone() for n, p in module.named_parameters()}

    def update(self, module: torch.nn.Module) -> float:
        with torch.no_grad():
            for (name, p), q in zip(module.named_parameters(), self.copy[0].parameters(), strict=True):
                self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * p
                q.lerp_(p, 0.5).mul_(1.01)
        return float(
            sum(s.sum() for s in self.shadow.values()) + sum(q.detach().sum() for q in self.copy[0].parameters())
        )


class Averaging(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.average = Average(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(self.average.update(self.net))
        return super().training_step(batch, batch_idx)


class Drawing(Deep):
    """Generators of every kind, held by the module."""

    def __init__(self) -> None:
        super().__init__()
        self.own = [torch.Generator().manual_seed(1), random.Random(1), np.random.RandomState(1)]
        self.modern = {"numpy": np.random.default_rng(1)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.randn(batch[0].shape, generator=self.own[0])
        self.seen.append([self.own[1].random(), self.own[2].rand(), self.modern["numpy"].random()])
        return super().training_step([batch[0] + 0.1 * noise], batch_idx)


class Estimating(Deep):
    """Reads what the trainer builds when it is asked."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append([self.trainer.estimated_stepping_batches, self.trainer.num_training_batches])
        return super().training_step(batch, batch_idx)


class Scaling(Deep):
    """Overwrites its batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[0].mul_(0.5).sum().item())
        return super().training_step(batch, batch_idx)


class Told(torch.nn.Module):
    """A loss that tells its parts, by what it was given."""

    def __init__(self, log: Callable[..., None]) -> None:
        super().__init__()
        self.log = [log]

    def forward(self, output: Tensor) -> Tensor:
        self.log[0]("spread", output.std())
        return output.square().mean()


class Logging(Deep):
    """Gives its `log` away."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = Told(self.log)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.net(batch[0]))


def running_mean() -> Callable[[Tensor], Tensor]:
    mean: Tensor | None = None

    def normalized(loss: Tensor) -> Tensor:
        nonlocal mean
        mean = loss.detach() if mean is None else 0.9 * mean + 0.1 * loss.detach()
        return loss / mean

    return normalized


class Normalizing(Deep):
    """Holds a function that keeps a number."""

    def __init__(self) -> None:
        super().__init__()
        self.normalized = running_mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.normalized(super().training_step(batch, batch_idx))


class Fused(Manual):
    """Makes the optimizers' steps in the backward."""

    def on_train_start(self) -> None:
        optimizers = {p: torch.optim.Adam([p], 1e-2) for p in self.parameters()}

        def step(p: torch.nn.Parameter) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in self.parameters():
            p.register_post_accumulate_grad_hook(step)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return None


KINDS = [
    *(Scheduled, Stopping, Replaying, Measuring, Averaging, Drawing, Estimating, Scaling, Logging, Normalizing),
    pytest.param(Fused, marks=pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None.")),
]


@pytest.mark.slow
@pytest.mark.parametrize("factory", KINDS)
@pytest.mark.parametrize("options", [{}, pytest.param(SEARCH, marks=pytest.mark.slow)], ids=["keep", "search"])
def test_what_a_step_changes_is_as_in_the_plain_run(tmp_path: Path, factory: Any, options: dict[str, Any]) -> None:
    assert_same_run(tmp_path, factory, callback=remat(**options), max_steps=6, max_epochs=2)


@pytest.mark.slow
def test_keep_tries_no_optimizer_step(tmp_path: Path) -> None:
    steps: list[int] = []

    class Hooked(Deep):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            steps.append(self.global_step)
            super().optimizer_step(*args, **kwargs)

    assert_same_run(tmp_path, Hooked, max_steps=3)
    assert steps == [0, 1, 2] * 2
