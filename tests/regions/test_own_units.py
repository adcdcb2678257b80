"""What is recomputed reads gathered parameters in the forward or the backward of their own unit, and nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded_nets import FEATURES, Transformer, one_of_many, shard
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_remat import rematerialize
from lightning_remat.measure.meter import tensor_storage
from lightning_remat.module_state.ambient import is_recomputing
from lightning_remat.module_state.sharding import gathered_tensors, gathering_units, groups_of


class Readers(TorchDispatchMode):
    """Counts operations that read what a unit has gathered, while that unit runs and while it does not.

    Attributes:
        running: The groups of parameters whose unit is in its forward or its backward.
        recomputing: Reads of running units in recomputations.
        outside: The operations that read others, and the places of these.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.groups = [group for unit in gathering_units(module) for group in groups_of(unit)]
        self.running: set[Any] = set()
        self.recomputing, self.outside = 0, Counter[tuple[str, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = {id(tensor_storage(t)) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for place, group in enumerate(self.groups):
            if read.isdisjoint(id(tensor_storage(t)) for t in gathered_tensors(group)):
                continue
            if group in self.running:
                self.recomputing += is_recomputing()
            else:
                self.outside[str(func), place] += 1
        return func(*args, **(kwargs or {}))


def note_running(patch: pytest.MonkeyPatch, readers: Readers) -> None:
    """Lets FSDP2 tell when units begin and end."""

    def told(name: str, tell: Callable[[Any], object], *, is_first: bool) -> None:
        original = getattr(FSDPParamGroup, name)

        def run(group: Any, *args: Any, **kwargs: Any) -> Any:
            if is_first:
                tell(group)
            result = original(group, *args, **kwargs)
            if not is_first:
                tell(group)
            return result

        patch.setattr(FSDPParamGroup, name, run)

    for phase in ("forward", "backward"):
        told(f"pre_{phase}", readers.running.add, is_first=True)
        told(f"post_{phase}", readers.running.discard, is_first=False)


def reads(module: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Counter[tuple[str, int]]]:
    readers = Readers(module)
    with monkeypatch.context() as patch:
        note_running(patch, readers)
        with readers:
            module(x).square().mean().backward()
    assert not readers.running
    return readers.recomputing, readers.outside


@pytest.mark.slow
@pytest.mark.parametrize("stages", [0, 2])
@pytest.mark.parametrize("reshards", [True, False])
def test_recomputations_read_their_own_unit_alone(stages: int, reshards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with one_of_many(2) as mesh:
        module, x = Transformer(stages=stages), torch.randn(64, FEATURES)
        shard(module, mesh=mesh, reshard_after_forward=reshards)
        assert reads(module, x, monkeypatch) == (0, Counter())
        rematerialize(module, x, memory_budget="90%", planner="periodic")
        recomputing, trespasses = reads(module, x, monkeypatch)
        assert recomputing
        assert not trespasses, trespasses
