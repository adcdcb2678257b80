"""What the units of a sharded module add to its step, read from FSDP2 and from the order in which they run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..module_state.sharding import groups_of
from ..plans.gathering import Event, Gathering, Unit
from .calls import Call, View


def gathering_of(view: View) -> Gathering | None:
    """The units that ran when a step was looked through, and when; None if there were none."""
    if not view.moments:
        return None
    units: dict[nn.Module, int] = {}
    for moment in view.moments:
        units.setdefault(moment.unit, len(units))
    timed: list[tuple[int, Event]] = [(call.tick, Event("call", k)) for k, call in enumerate(view.calls)]
    timed += [(m.tick, Event("enter" if m.begins else "leave", units[m.unit], m.has_gradient)) for m in view.moments]
    events = tuple(event for _, event in sorted(timed, key=lambda pair: pair[0]))
    return Gathering(tuple(_unit(unit, view.calls) for unit in units), events)


def _unit(module: nn.Module, calls: Sequence[Call]) -> Unit:
    inside = {id(p) for call in calls for p in call.module.parameters()}
    groups = [_group(group, inside) for group in groups_of(module)]
    return Unit(*(sum(sizes) for sizes in zip(*groups, strict=True)))


def _group(group: Any, inside: set[int]) -> tuple[int, ...]:
    """The figures of a `Unit`, in its order, of parameters that are gathered together."""
    is_spread = hasattr(group.mesh_info, "shard_mesh_size")
    world_size = group.mesh_info.shard_mesh_size if is_spread else 1
    full = cast = reduced = scattered = cast_gradient = outside = outside_shards = 0
    for p in group.fsdp_params:
        numel = math.prod(p.padded_sharded_param_size)
        full += world_size * numel * (p.param_dtype or p.orig_dtype).itemsize
        if p.param_dtype is not None:
            cast += numel * p.param_dtype.itemsize
        if not p.sharded_param.requires_grad:
            continue
        reduce_dtype = group._reduce_dtype or p.param_dtype or p.orig_dtype
        reduced += world_size * numel * reduce_dtype.itemsize
        scattered += numel * reduce_dtype.itemsize
        if reduce_dtype != p.orig_dtype:
            cast_gradient += numel * p.orig_dtype.itemsize
        if id(p.sharded_param) not in inside:
            outside += _full_gradient_bytes(p.sharded_param, (p.param_dtype or p.orig_dtype).itemsize)
            outside_shards += numel * p.orig_dtype.itemsize
    kept = 0
    if not group._reshard_after_forward:
        kept = full
    elif group._use_post_forward_mesh:
        kept = full // group.post_forward_mesh_info.shard_mesh_size
    buffer = full if world_size > 1 else 0
    return full, buffer, cast, kept, reduced, scattered, cast_gradient, outside, outside_shards


def _full_gradient_bytes(shard: Tensor, itemsize: int) -> int:
    return shard.numel() * itemsize
