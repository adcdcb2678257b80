"""Strategies under which parameters hide or move in a step are refused by a sentence with the remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from sharded_nets import one_of_many
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_remat import Rematerialization, rematerialize
from lightning_remat.trainer.setup import check_supported


def check(strategy: object) -> None:
    """As at the start of `fit`, of a trainer that has this strategy: FSDP1 and DeepSpeed want devices to be made."""
    trainer = SimpleNamespace(callbacks=[], strategy=strategy)
    check_supported(cast(Any, trainer), LightningModule(), Rematerialization(batch_size="keep"))


class Tuned(FSDPStrategy):
    """A subclass, as users have them."""


@pytest.mark.parametrize("kind", [DeepSpeedStrategy, FSDPStrategy, Tuned])
def test_refused_with_the_remedy(kind: type[Any]) -> None:
    told = rf"does not work with {kind.__name__}, .*: use ModelParallelStrategy with fully_shard in configure_model"
    with pytest.raises(MisconfigurationException, match=told):
        check(object.__new__(kind))


@pytest.mark.parametrize("kind", [DDPStrategy, ModelParallelStrategy])
def test_taken(kind: type[Any]) -> None:
    check(object.__new__(kind))


@pytest.mark.parametrize("is_inside", [False, True])
def test_fsdp1_without_lightning(is_inside: bool) -> None:
    with one_of_many(2):
        module: nn.Module = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        if is_inside:
            module = nn.Sequential(module, nn.Tanh())
        with pytest.raises(ValueError, match=r"Remedy: .* shard with torch\.distributed\.fsdp\.fully_shard instead"):
            rematerialize(module, torch.zeros(2, 4), memory_budget="90%")
