"""Which submodules of a step are looked at: those that the user has named, or all that may be of interest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from ..capture.compiled_by_users import is_compiled
from ..module_state.refusals import reason_against
from ..module_state.sharding import has_units, whole_parts


def submodules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """The module and all below it under all their names."""
    return list(cast(Any, root).named_modules(remove_duplicate=False))


def divided(modules: Sequence[Any] | None) -> tuple[list[Any], list[Any] | None]:
    """Of what is to be watched, what is watched by the graphs of its forward, and what as a whole."""
    if modules is None:
        return [], None
    in_graphs = [m.rpartition("[")[0] for m in modules if isinstance(m, str) and m.endswith("]")]
    return in_graphs, [m for m in modules if not (isinstance(m, str) and m.endswith("]"))]


def resolved(
    root: nn.Module, names: Mapping[nn.Module, str], modules: Sequence[Any] | None, *, may_nest: bool = False
) -> list[nn.Module]:
    """The submodules that are meant.

    Args:
        root: Above all of them.
        names: Of all submodules.
        modules: Submodules or their names; None for those that take hooks, of a sharded root the parts that are whole.
        may_nest: Whether they may lie inside one another.

    Raises:
        ValueError: One is not there, takes no hooks or lies inside another.
    """
    if modules is None:
        found = list(whole_parts(root)) if has_units(root) else list(names)
        compiled = {inner for m in names if is_compiled(m) for inner in m.modules()}  # hooks would be compiled into it
        return [m for m in found if m not in compiled and not isinstance(m, torch.jit.ScriptModule)]
    by_name = dict(submodules(root))
    found: list[nn.Module] = []
    for item in modules:
        module = by_name.get(item) if isinstance(item, str) else item
        if module is None or module not in names:
            raise ValueError(f"modules names {item!r}, which is no submodule of {type(root).__name__}")
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"modules names {names[module]!r}: {reason_against(module)}")
        found.append(module)
    for outer in () if may_nest else found:
        for inner in found:
            if inner is not outer and any(inner is m for m in outer.modules()):
                raise ValueError(f"modules names {names[outer]!r} and {names[inner]!r}, which lies inside it: name one")
    return list(dict.fromkeys(found))
