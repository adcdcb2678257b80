"""What the units of a sharded module add to its step, read from FSDP2 and from the order in which they run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..module_state.sharding import groups_of, holds_received, may_reshard, set_reshards
from ..plans.gathering import Event, Gathering, Unit
from .calls import Call, View


def units_in(view: View) -> list[nn.Module]:
    """The units that ran when a step was looked through, in the order of a `Gathering`."""
    return list(dict.fromkeys(moment.unit for moment in view.moments))


def gathering_of(view: View, bandwidth: float | None = None) -> Gathering | None:
    """The units that ran when a step was looked through, and when; None if there were none.

    Args:
        view: Of the step.
        bandwidth: Bytes a second that a gather receives, where it is to be planned which units are resharded after
            their forward. The outermost is left as it is, since its backward begins when its forward ends, and so are
            those that are resharded to a smaller group.
    """
    if not view.moments:
        return None
    units = {unit: u for u, unit in enumerate(units_in(view))}
    timed: list[tuple[int, Event]] = [(call.tick, Event("call", k)) for k, call in enumerate(view.calls)]
    timed += [(m.tick, Event("enter" if m.begins else "leave", units[m.unit], m.has_gradient)) for m in view.moments]
    events = tuple(event for _, event in sorted(timed, key=lambda pair: pair[0]))
    found = [_unit(unit, view.calls) for unit in units]
    if bandwidth is not None:
        outermost = view.moments[0].unit
        for unit, u in units.items():
            if unit is not outermost and may_reshard(unit):
                received = sum(_received_bytes(group) for group in groups_of(unit))
                found[u] = replace(found[u], gather_seconds=received / bandwidth)
    return Gathering(tuple(found), events, holds_received())


def _received_bytes(group: Any) -> int:
    """What a gather receives from other processes."""
    size = group.mesh_info.shard_mesh_size
    numel = ((math.prod(p.padded_sharded_param_size), p.param_dtype or p.orig_dtype) for p in group.fsdp_params)
    return sum((size - 1) * number * kind.itemsize for number, kind in numel)


def reshard_as_planned(units: Sequence[nn.Module], gathering: Gathering | None) -> list[nn.Module]:
    """Lets units be resharded after their forward, or not, as it is planned; `restore` undoes it.

    Args:
        units: As `units_in` gives them.
        gathering: Of the plan.

    Returns:
        The units of which that was planned.
    """
    planned = {} if gathering is None else {units[u]: gathering.units[u].kept_bytes for u in gathering.planned}
    for unit, kept_bytes in planned.items():
        set_reshards(unit, not kept_bytes)
    return list(planned)


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
            outside += p.sharded_param.numel() * (p.param_dtype or p.orig_dtype).itemsize  # of all shards together
            outside_shards += numel * p.orig_dtype.itemsize
    kept = 0
    if not group._reshard_after_forward:
        kept = full
    elif group._use_post_forward_mesh:
        kept = full // group.post_forward_mesh_info.shard_mesh_size
    buffer = full if world_size > 1 else 0
    return full, buffer, cast, kept, reduced, scattered, cast_gradient, outside, outside_shards
