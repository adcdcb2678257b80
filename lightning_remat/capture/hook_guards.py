"""Whether submodules have hooks, asked of all at once: TorchDynamo's guards ask it of six dictionaries of each.

Those are a third of all that is guarded of a network of many small layers, and guards are what a call costs there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from torch import nn

_OF_A_SUBMODULE = re.compile(r"self(\._modules\['[^']+'\])+\._(forward|backward)(_pre)?_hooks(_with_kwargs)?")


class Guarded(Protocol):
    """What TorchDynamo says of a guard.

    Attributes:
        name: The expression of what is guarded, by the names of the function's arguments.
    """

    name: str


def without_hooks(guards: Sequence[Guarded]) -> list[bool]:
    """Which guards there must be for a module of which it is seen to otherwise that no submodule has hooks."""
    return [_OF_A_SUBMODULE.fullmatch(guard.name) is None for guard in guards]


def has_hooked_submodules(module: nn.Module) -> bool:
    """Whether any submodule has hooks that a call of it runs.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    >>> has_hooked_submodules(net)
    False
    >>> handle = net[1][0].register_forward_hook(print)
    >>> has_hooked_submodules(net)
    True
    """
    found = [*module._modules.values()]
    try:
        for m in found:  # which grows meanwhile
            if m is None:
                continue
            own = m.__dict__  # the names are those by which `nn.Module.__call__` tells whether there are any
            if (
                own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or own["_backward_hooks"]
                or own["_backward_pre_hooks"]
            ):
                return True
            found += own["_modules"].values()
    except KeyError:  # of torch.jit, or never initialized: nobody knows
        return True
    return False
