"""Modules whose forward must not be rewritten, or must run plain at the moment, and why."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from torch._dynamo import config, eval_frame
from torch.autograd import forward_ad
from torch.jit._trace import is_tracing
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore
from torch.utils._device import DeviceContext

from .sharding import has_units, managed_parameters, reason_against_units

_C = cast(Any, torch)._C
_Module: Any = nn.Module
_eval_frame: Any = eval_frame
_STANCE = 'torch.compiler.set_stance("force_eager")'

REMEDIES = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "rematerialize the module inside, wrapped or not",
    "torch.nn.parallel.data_parallel.DataParallel": "rematerialize the module inside, before wrapping",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "its parameters are flat and hidden from its forward; shard with torch.distributed.fsdp.fully_shard instead"
    ),
    "torch._dynamo.eval_frame.OptimizedModule": "rematerialize the module that was compiled (module._orig_mod) instead",
    "lightning.fabric.wrappers._FabricModule": "rematerialize the module given to `fabric.setup`, before or after",
    "torch.jit._script.ScriptModule": "rematerialize the module before it is compiled by torch.jit",
}
"""Classes by their dotted names, so that none has to be imported, and what to do instead."""

SWITCH_ON = "leave it on where plans are made and run"
"""What to do where TorchDynamo is switched off."""


def reason_against(module: nn.Module, *, is_gathered: bool = False) -> str | None:
    """Why the module cannot be rewritten, with the remedy, or None.

    Args:
        module: What is to be rewritten.
        is_gathered: Whether its parameters are those of a unit under `fully_shard`, in one piece while it runs.
    """
    for path, submodule in cast(Iterable[tuple[str, nn.Module]], module.named_modules()):
        what = f"{type(submodule).__name__} ({path})" if path else type(submodule).__name__
        for name, remedy in REMEDIES.items():
            if (not path or "fsdp" in name) and _is_instance(submodule, name):
                return f"{what} is a {name.rpartition('.')[2]}. Remedy: {remedy}"
    if (switch := switched_off_by()) is not None:
        return f"TorchDynamo, which captures what modules do, is switched off by {switch}. Remedy: {SWITCH_ON}"
    managed = managed_parameters(module) if has_units(module) else ()
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedTensorMixin):
            return f"the parameter {name} has no shape yet. Remedy: run the module once"
        if parameter.requires_grad and parameter.is_inference():
            return (
                f"the parameter {name} was made in torch.inference_mode(): nothing trains it. Remedy: make it outside"
            )
        is_spread = type(parameter.data).__module__.startswith("torch.distributed")
        if is_spread and not is_gathered and id(parameter) not in managed:
            return (
                f"the parameter {name} is a {type(parameter.data).__name__}, spread over processes by other means than "
                "fully_shard (tensor parallel), whose operations are not captured yet. Remedy: shard it by fully_shard"
            )
    return reason_against_units(module)


def is_sharded(module: nn.Module) -> bool:
    """Whether parameters of the module are in one piece only during its own forward and backward."""
    names = [name for name in REMEDIES if "fsdp" in name]  # those of FSDP1
    return any(_is_instance(submodule, name) for submodule in module.modules() for name in names)


def _is_instance(module: nn.Module, name: str) -> bool:
    file, _, kind = name.rpartition(".")
    loaded = sys.modules.get(file)
    return loaded is not None and isinstance(module, getattr(loaded, kind, ()))


def switched_off_by() -> str | None:
    """What keeps TorchDynamo from capturing anything in this process, or None."""
    switches = {
        "TORCHDYNAMO_DISABLE=1": os.environ.get("TORCHDYNAMO_DISABLE") == "1",
        "torch._dynamo.config.disable (TORCH_COMPILE_DISABLE=1)": bool(config.disable),
        _STANCE: _is_forced_eager(),
    }
    return next((switch for switch, is_set in switches.items() if is_set), None)


def _is_forced_eager() -> bool:
    return _eval_frame._stance.stance == "force_eager"


def is_captured() -> bool:
    """Whether the code that asks runs for `torch.export` or `torch.jit.trace`, which want the plain forward."""
    return torch.compiler.is_exporting() or is_tracing()


def is_in_checkpoint() -> bool:
    """Whether the code that asks runs within `torch.utils.checkpoint`, for the first time or again."""
    hooks = _C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def in_the_way() -> str | None:
    """Why the plain forward must run at the moment, or None."""
    if _C._functorch.maybe_current_level() is not None:
        return "it is called in a transform of torch.func, which takes no saved-tensor hooks"
    if forward_ad._current_level >= 0:  # pyright: ignore
        return "it is called where derivatives are taken forwards, of which a recomputation has none"
    return mode_in_the_way()


def mode_in_the_way() -> str | None:
    """Why nothing can be captured under the modes that are active, or None.

    Under dispatch modes, of a profiler or a counter, TorchDynamo leaves code as it is, and so where it is told to. What
    users' modes for functions do it captures, and they would do it once more where that runs.
    """
    if _is_forced_eager():
        return f"{_STANCE} is in force, by which TorchDynamo captures nothing"
    if _Module.__call__ is not _Module._wrapped_call_impl:
        return "torch.nn.Module.__call__ has been replaced, which TorchDynamo does not look at"
    modes = (_C._get_function_stack_at(k) for k in range(_C._len_torch_function_stack()))
    found = [mode for mode in modes if not isinstance(mode, DeviceContext)]
    modes = (_C._get_dispatch_stack_at(k) for k in range(_C._len_torch_dispatch_stack()))
    found += [mode for mode in modes if not mode.is_infra_mode() and not mode.ignore_compile_internals()]
    if not found:
        return None
    return f"{type(found[0]).__name__} is active, under which TorchDynamo captures nothing that may run"
