"""The Python attributes of modules (counters, caches, lists): what a run changes in them can be undone."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

# The attributes of users' modules have no types.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false


class PythonState:
    """The attributes of a module and its submodules, containers among them one level deep, to return to."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [(path, m, _snapshot(m)) for path, m in module.named_modules()]

    @classmethod
    def of(cls, holders: Mapping[str, Any]) -> PythonState:
        """The attributes of any objects, by names that `put_back` gives in place of module paths."""
        state = cls.__new__(cls)
        state._before = [(name, holder, _snapshot(holder)) for name, holder in holders.items()]
        return state

    def put_back(self) -> list[tuple[str, str]]:
        """Undoes every change; returns (module path, attribute) of each."""
        return [(path, name) for path, m, before in self._before for name in _put_back(m, before)]

    @contextmanager
    def replayed(self, module: nn.Module) -> Generator[None, None, None]:
        """Lets `module` see this state inside, and the present one afterwards."""
        now = PythonState(module)
        self.put_back()
        try:
            yield
        finally:
            now.put_back()


def _snapshot(holder: Any) -> dict[str, Any]:
    return {k: (v, copy.copy(v) if isinstance(v, (dict, list, set)) else v) for k, v in vars(holder).items()}


def _put_back(holder: Any, before: dict[str, Any]) -> list[str]:
    state = vars(holder)
    changed = [name for name in state if name not in before]
    for name in changed:
        del state[name]
    for name, (value, contents) in before.items():
        same = state.get(name, state) is value
        if isinstance(value, (dict, list, set)) and _differs(value, contents):
            same = False
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(contents)
        if not same:
            state[name] = value
            changed.append(name)
    return changed


def _differs(value: Any, contents: Any) -> bool:
    if isinstance(value, dict):
        return value.keys() != contents.keys() or any(value[k] is not contents[k] for k in contents)
    if isinstance(value, list):
        return len(value) != len(contents) or any(a is not b for a, b in zip(value, contents, strict=True))
    return value != contents
