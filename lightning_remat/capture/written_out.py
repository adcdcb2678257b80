"""A sequence of modules without its loop, which TorchDynamo does not divide: it would run as a whole as it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

from torch import nn

_Sequence: Any = nn.Sequential


def divisible(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module as a function that takes it first, such that TorchDynamo can divide it.

    >>> import torch
    >>> module = nn.Sequential(nn.ReLU(), nn.Tanh())
    >>> divisible(module)(module, torch.zeros(2))
    tensor([0., 0.])
    """
    function: Any = type(module).forward
    return _written_out(tuple(cast(Any, module)._modules)) if function is _Sequence.forward else function


@lru_cache
def _written_out(names: tuple[str, ...]) -> Callable[..., Any]:
    """The forward of sequences of modules by these names; of others it is the loop."""
    calls = [f"    input = modules[{name!r}](input)" for name in names]
    head = ["def forward(self, input):", "    modules = self._modules", "    if tuple(modules) != names:"]
    source = "\n".join([*head, "        return plain(self, input)", *calls, "    return input"])
    namespace: dict[str, Any] = {"names": names, "plain": _Sequence.forward}
    exec(compile(source, "<sequence>", "exec"), namespace)
    return namespace["forward"]
