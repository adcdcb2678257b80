"""What a forward logs divides it, while it is tried as while it trains: TorchDynamo does not look into `self.log`.

Else it would be captured as a whole while it is tried, where nothing is logged, and in training in many small parts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule


def _untraced(function: Any) -> Any:
    return cast(Any, torch.compiler).disable(function, reason="what is logged is no part of a graph")


@_untraced
def ignore_log(*args: Any, **kwargs: Any) -> None:
    """In the place of `self.log` and `self.log_dict` where nothing is logged."""
    del args, kwargs


def divide_at_logs() -> Callable[[], None]:
    """Divides all forwards that log there; what undoes it."""
    undo = ExitStack()
    for name in ("log", "log_dict"):
        method = vars(LightningModule)[name]
        undo.callback(setattr, LightningModule, name, method)
        setattr(LightningModule, name, _untraced(method))
    return undo.close
