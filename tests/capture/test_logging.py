"""What a library says once in a forward divides no graph, and a capture itself says nothing."""

import functools
import logging
import threading

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import rematerialize

logger = logging.getLogger("somebody's library")


class TellsOnce(nn.Sequential):
    """As models of transformers do in their loss."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        logger.warning_once("the loss comes")  # type: ignore[attr-defined]
        return y.square().mean()


@pytest.mark.slow
def test_what_is_said_once_divides_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    once = functools.lru_cache(None)(lambda self, message: self.warning(message))
    monkeypatch.setattr(logging.Logger, "warning_once", once, raising=False)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()) for _ in range(8)]
    module, x = TellsOnce(*layers), torch.randn(512, 8)
    plan = rematerialize(module, x, memory_budget="80%", planner="periodic")
    assert plan.num_recomputed
    assert plan.rung == "traced"
    module(x).backward()


class AsksForAValue(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * max(y.sum().item(), 1.0)


class RemovesAHook(nn.Sequential):
    """At which TorchDynamo fails within itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        handle = y.register_hook(lambda g: g * 2)
        y = y.sin()
        handle.remove()
        return y


class AsksForTheThread(nn.Sequential):
    """For which TorchDynamo says that it is to be told."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if threading.get_ident() else 3)


def doubled_without_data(x: Tensor) -> Tensor:
    raise RuntimeError("it needs data")


LIBRARY = torch.library.Library("remat_logging", "FRAGMENT")
LIBRARY.define("doubled(Tensor x) -> Tensor")
LIBRARY.impl("doubled", lambda x: x * 2, "CPU")  # type: ignore[arg-type]
LIBRARY.impl("doubled", doubled_without_data, "Meta")


class FailsOnFakeTensors(nn.Sequential):
    """Calls an operation that knows nothing of tensors without data, of which PyTorch logs a traceback."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + torch.ops.remat_logging.doubled(y.detach())


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [nn.Sequential, AsksForAValue, RemovesAHook, AsksForTheThread, FailsOnFakeTensors])
def test_a_capture_says_nothing(kind: type[nn.Sequential], caplog: pytest.LogCaptureFixture) -> None:
    module, x = kind(*(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()) for _ in range(2))), torch.randn(64, 8)
    rematerialize(module, x, memory_budget="100%")
    module(x).sum().backward()
    assert [r for r in caplog.records if r.name.startswith("torch")] == []
