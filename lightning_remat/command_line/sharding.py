"""A model under `fully_shard` in a world of which this process plays the first rank, and nobody the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def imagined_world(size: int) -> Generator[DeviceMesh]:
    """A mesh of so many processes for the block: nothing is sent, and what is received is arbitrary.

    Not to be called under a fake tensor mode, since the mesh holds numbers.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()


def shard_blocks(module: nn.Module, mesh: DeviceMesh) -> Counter[str]:
    """Calls `fully_shard` on every repeated block, then on the module; returns how many blocks each class has."""
    blocks = repeated_blocks(module)
    kinds = Counter(type(block).__name__ for block in blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return kinds


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The parts that people shard one by one: those of a class of which some container holds several.

    A block inside another one is none, nor is a single layer, nor a container of blocks.
    """
    repeated = set(_repeated(module))
    classes = {type(block) for block in repeated} - {nn.Sequential}
    return list(dict.fromkeys(_outermost(module, repeated, classes)))


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    kinds = Counter(type(child) for child in module.children() if _is_container(module))
    for child in module.children():
        inner = list(_repeated(child)) if _is_container(child) or kinds[type(child)] < 2 else []
        yield from inner
        if not inner and kinds[type(child)] > 1 and any(child.children()) and any(True for _ in child.parameters()):
            yield child


def _outermost(module: nn.Module, blocks: set[nn.Module], classes: set[type[nn.Module]]) -> Iterator[nn.Module]:
    for child in module.children():
        if child in blocks or type(child) in classes:
            yield child
        else:
            yield from _outermost(child, blocks, classes)


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
