"""Modules under FSDP2 (`torch.distributed.fsdp.fully_shard`): their units, and an end to what a forward has begun.

A unit is what `fully_shard` was called on. Its parameters, those of the units inside apart, are shards; they are
gathered before its forward and again before its backward, and are in one piece only in between.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

# Of FSDP2's own names only these few are used, here and in `gathering`.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

_MODULE = "torch.distributed.fsdp._fully_shard._fully_shard"
_CONTEXT = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def is_unit(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on the module."""
    loaded = sys.modules.get(_MODULE)
    return loaded is not None and isinstance(module, loaded.FSDPModule)


def holds_received() -> bool:
    """Whether FSDP2 holds what was received last while it copies the next gather to the parameters.

    Until torch 2.14 the function that copies has a name for it; in torch 2.15 another one lets go of it before.
    """
    return not hasattr(sys.modules[_CONTEXT].FSDPCommContext, "release_all_gather_state_for_comm_reuse")


def has_units(module: nn.Module) -> bool:
    """Whether the module is a unit or holds one."""
    return _MODULE in sys.modules and any(map(is_unit, module.modules()))


def holds_units(module: nn.Module) -> bool:
    """Whether there are units below the module, so that its forward goes through several gathers."""
    return _MODULE in sys.modules and any(is_unit(m) for m in module.modules() if m is not module)


def whole_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or the outermost submodules, whose forwards do not go through several gathers.

    Single layers of PyTorch's are left out where there are several parts: each is one operation.
    """
    if not holds_units(module):
        yield module
        return
    for child in module.children():
        if holds_units(child):
            yield from whole_parts(child)
        elif is_layer(child):
            continue
        elif type(child).forward is nn.Module.forward:  # a container
            yield from (m for m in child.children() if not is_layer(m))
        else:
            yield child


def is_layer(module: nn.Module) -> bool:
    """Whether the module is a single layer of PyTorch's, or compiled by `torch.jit`, into which nobody can look."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    own = next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed."))
    return own.__module__.startswith("torch.nn.") and not any(module.children())


def gathered_modules(root: nn.Module) -> set[nn.Module]:
    """The modules whose parameters are there only while a unit around them runs."""
    return {inner for m in root.modules() if is_unit(m) for inner in m.modules()}


def groups_of(unit: nn.Module) -> list[Any]:
    """The groups of parameters that are gathered together when the unit runs."""
    state = cast(Any, unit)._get_fsdp_state()
    if hasattr(state, "_fsdp_param_group"):  # torch 2.11 has one of them
        return [state._fsdp_param_group] if state._fsdp_param_group else []
    return state._fsdp_param_groups


def gathering_units(root: nn.Module) -> list[nn.Module]:
    """The units that gather parameters of their own."""
    return [m for m in root.modules() if is_unit(m) and groups_of(m)] if has_units(root) else []


_RESHARDS = "_rematerialized_resharding"
"""What a unit has, on which it was planned whether it is resharded after its forward: what it was set to before."""


def may_reshard(unit: nn.Module) -> bool:
    """Whether a unit is resharded after its forward or not, neither in part nor replicated."""
    return all(hasattr(g.mesh_info, "shard_mesh_size") and not g._use_post_forward_mesh for g in groups_of(unit))


def set_reshards(unit: nn.Module, reshards: bool) -> None:
    """Lets a unit be resharded after its forward, or stay gathered until its backward."""
    vars(unit).setdefault(_RESHARDS, [group.post_forward_mesh_info for group in groups_of(unit)])
    cast(Any, unit).set_reshard_after_forward(reshards, recurse=False)


def planned_resharding(unit: nn.Module) -> bool | None:
    """Whether a unit is resharded by a plan; None where none says."""
    return groups_of(unit)[0]._reshard_after_forward if _RESHARDS in vars(unit) else None


def restore_resharding(module: nn.Module) -> None:
    """Undoes `set_reshards`."""
    before = vars(module).pop(_RESHARDS, None)
    if before is not None:
        for group, info in zip(groups_of(module), before, strict=True):
            group.post_forward_mesh_info = info


def gathered_tensors(group: Any) -> list[Tensor]:
    """What the parameters of a group are gathered into; their storages are empty where they are not gathered."""
    return [tensor for parameter in group.fsdp_params for tensor in parameter.all_gather_outputs]


def last_gathered_bytes(groups: list[Any]) -> list[int]:
    """Of the last of these tensors of each group: since all are resized at once, or one after the other, it tells of
    all. One comprehension without calls between, as it is asked at every operation.
    """
    return [
        tensors[-1].untyped_storage().nbytes() if (tensors := group.fsdp_params[-1].all_gather_outputs) else 0
        for group in groups
    ]


def reason_against_units(root: nn.Module) -> str | None:
    """Why the units of a module cannot be rematerialized, with the remedy, or None."""
    for path, module in root.named_modules():
        if not is_unit(module):
            continue
        if not hasattr(module, "reset_iter_state"):
            return f"this torch ({torch.__version__}) cannot end a sharded forward. Remedy: torch 2.13 or newer"
        for group in groups_of(module):
            for parameter in group.fsdp_params:
                if parameter.is_dtensor:
                    return (
                        f"{path or type(module).__name__} is under fully_shard and tensor parallel, which is not "
                        "captured yet. Remedy: shard it by fully_shard alone"
                    )
    return None


def managed_parameters(root: nn.Module) -> set[int]:
    """The ids of the shards of all units."""
    return set(map(id, _shards(root)))


@contextmanager
def settled(root: nn.Module) -> Generator[None]:
    """All units are resharded before the block and after it, whatever it has left undone; gradients of shards stay.

    A forward without a backward, or an error, would leave parameters gathered and FSDP2 in wait of a backward.
    """
    settle(root)
    try:
        yield
    finally:
        settle(root)


def settle(root: nn.Module) -> None:
    """Reshards all units, and ends what they are in the midst of."""
    if not has_units(root):
        return
    for unit in root.modules():
        if is_unit(unit) and cast(Any, unit)._get_fsdp_state()._is_root:
            gradients = [(shard, shard.grad) for shard in _shards(unit)]
            cast(Any, unit).reset_iter_state()  # lets go of gradients too
            for shard, gradient in gradients:
                shard.grad = gradient


def _shards(root: nn.Module) -> Iterator[Tensor]:
    for unit in root.modules():
        if is_unit(unit):
            for group in groups_of(unit):
                for parameter in group.fsdp_params:
                    yield parameter.sharded_param


def local_part(tensor: Tensor) -> Tensor:
    """Of a tensor that is spread over processes, what lies here; any other tensor is itself."""
    return getattr(tensor, "_local_tensor", tensor)


def stand_ins(values: list[Any]) -> list[Any]:
    """The values with parameters that are gathered no more replaced by others of their sizes."""
    made: dict[int, Any] = {}
    for value in values:
        if isinstance(value, nn.Parameter) and _is_freed(value) and id(value) not in made:
            made[id(value)] = _stand_in(value)
    return [made.get(id(v), v) for v in values]


def _is_freed(parameter: Tensor) -> bool:
    return parameter.numel() > 0 and parameter.untyped_storage().nbytes() == 0


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    like = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device, requires_grad=False
    )
    # Of an ordinary size: operations take longer on what is next to zero.
    return nn.Parameter(like.fill_(1 / max(1, like.shape[-1] if like.dim() else 1)), parameter.requires_grad)
