"""Backward hooks of modules within a captured graph, which TorchDynamo leaves to compiled autograd, run as eager ones.

Reference: `torch.utils.hooks.BackwardHook`, which ties a module's inputs and outputs to its hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import getclosurevars
from typing import Any

from torch import fx
from torch.fx.experimental._backward_state import BackwardState
from torch.utils.hooks import BackwardHook

from ..errors import TraceError

_NAMES = {"module": "module_name", "user_hooks": "user_hooks_name", "user_pre_hooks": "user_pre_hooks_name"}
"""Attribute of `BackwardHook` → the variable in which TorchDynamo has its name in a `BackwardState`."""


class ModuleHooks:
    """Makes the `BackwardHook` of one call of a module.

    Args:
        names: Attribute of `BackwardHook` → that of the call's `BackwardState`.
    """

    __name__ = "backward_hooks"

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def __call__(self, state: BackwardState) -> BackwardHook:
        return _Hooks(state, self.names)


class _Hooks(BackwardHook):
    """Finds module and hooks when they fire: TorchDynamo fills the state right after the forward."""

    def __init__(self, state: BackwardState, names: Mapping[str, str]) -> None:
        super().__init__(None, (), ())  # pyright: ignore[reportUnknownMemberType]
        for name in names:
            delattr(self, name)
        self.state, self.names = state, names

    def __getattr__(self, name: str) -> Any:
        if name not in _NAMES:
            raise AttributeError(name)
        return getattr(self.state, self.names[name], ())


def silent(value: Any) -> Any:
    """A value of a placeholder; in the place of a state, one without hooks."""
    return BackwardState() if isinstance(value, BackwardState) else value


def replace_module_hooks(graph: fx.Graph) -> None:
    """Puts these in the place of TorchDynamo's targets.

    Raises:
        TraceError: The forward registers a hook on a tensor, which would belong to no operation.
    """
    for n in graph.nodes:
        name = getattr(n.target, "__name__", "") if n.op == "call_function" else ""
        if name == "_in_graph_bw_hooks":
            variables = getclosurevars(n.target).nonlocals
            n.target = ModuleHooks({name: variables[variable] for name, variable in _NAMES.items()})
        elif name == "_register_hook_trampoline":
            raise TraceError("it registers a hook on a tensor in a forward with backward hooks of modules")
