"""How fast the parameters of sharded modules are gathered."""

from __future__ import annotations

import math
import time
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn

from ..devices import synchronize
from ..module_state.agreement import all_ranks, is_shared
from ..module_state.sharding import gathering_units, groups_of

Bandwidth = float | Literal["measure"]
"""Bytes a second that a process receives in a gather; or that it is to be measured."""

_REPEATS = 3


def check_bandwidth(bandwidth: object) -> None:
    """Raises ValueError where it is no bandwidth."""
    if bandwidth is None or bandwidth == "measure":
        return
    if isinstance(bandwidth, bool) or not isinstance(bandwidth, int | float) or not bandwidth > 0:
        raise ValueError(f"gather_bandwidth is {bandwidth!r}, expected bytes a second, 'measure' or None")


def bandwidth_of(module: nn.Module, bandwidth: Bandwidth | None) -> float | None:
    """The bandwidth as a number, the same on all processes that share the module; None where it is None.

    Measured is the gather of the largest unit, the fastest of a few, on the slowest process.

    Raises:
        ValueError: It is to be measured, and there are no other processes.
    """
    if bandwidth != "measure":
        return bandwidth
    groups = [group for unit in gathering_units(module) for group in groups_of(unit)]
    if not is_shared(module) or not groups:
        raise ValueError(
            "gather_bandwidth='measure' gathers from other processes, and there are none. Remedy: give bytes a second"
        )
    return min(all_ranks(module, _measured(max(groups, key=_shard_bytes))))


def _shard_bytes(group: Any) -> int:
    return sum(math.prod(p.padded_sharded_param_size) * p.orig_dtype.itemsize for p in group.fsdp_params)


def _measured(group: Any) -> float:
    size, device = group.mesh_info.shard_mesh_size, group.device
    sent = torch.zeros(max(1, _shard_bytes(group)), dtype=torch.uint8, device=device)
    received = torch.empty(size * sent.numel(), dtype=torch.uint8, device=device)
    seconds: list[float] = []
    for _ in range(1 + _REPEATS):  # the first makes connections
        synchronize(device)
        start = time.perf_counter()
        cast(Any, dist).all_gather_into_tensor(received, sent, group=group.mesh_info.shard_process_group)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return (size - 1) * sent.numel() / max(min(seconds[1:]), 1e-9)
