"""Networks that are sharded block by block, and a process that takes itself for one of many."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchvision.models.resnet import BasicBlock

WIDTH = 32
FEATURES, SAMPLES = 8, 256

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """An MLP with dropout, of which the residual is the caller's or not."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.gelu(self.up(self.norm(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.drop(self.down(y))


class Transformer(nn.Module):
    """Blocks, each a unit, between two layers of the root's; in stages, which are units too, where wanted."""

    def __init__(self, *, stages: int = 0, breaks: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 5)
        blocks = [Block(breaks=breaks) for _ in range(4)]
        size = len(blocks) // stages if stages else len(blocks)
        self.stages = nn.ModuleList(nn.Sequential(*blocks[k : k + size]) for k in range(0, len(blocks), size))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


def shard(module: nn.Module, **options: Any) -> nn.Module:
    """The module, its blocks and stages under `fully_shard`."""
    for inner in module.modules():
        if isinstance(inner, (Block, BasicBlock)):
            fully_shard(inner, **options)
    if isinstance(module, Transformer) and len(module.stages) > 1:
        for stage in module.stages:
            fully_shard(stage, **options)
    return fully_shard(module, **options)


@contextmanager
def one_of_many(world_size: int) -> Generator[DeviceMesh]:
    """In the block this process is the first of a group whose others are not there: nothing is exchanged."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with unset_fake_temporarily():
            mesh = init_device_mesh("cpu", (world_size,))
        yield mesh
    finally:
        dist.destroy_process_group()


@contextmanager
def counted(holder: Any, name: str) -> Generator[list[None]]:
    """An entry for each call of a function within the block."""
    calls: list[None] = []
    original = getattr(holder, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder, name, count)
        yield calls


def assert_same(expected: list[Tensor], found: list[Tensor]) -> None:
    unlike = [k for k, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.equal(a, b)]
    assert not unlike, f"{unlike} of {len(found)} differ"
