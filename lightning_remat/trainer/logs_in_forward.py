"""What a forward logs divides it, while it is tried as while it trains: TorchDynamo does not look into `self.log`.

Else it would be captured as a whole while it is tried, where nothing is logged, and in training in many small parts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule

from ..capture.shared_setting import Exchange, SharedSettings


def _untraced(function: Any) -> Any:
    return cast(Any, torch.compiler).disable(function, reason="what is logged is no part of a graph")


@_untraced
def ignore_log(*args: Any, **kwargs: Any) -> None:
    """In the place of `self.log` and `self.log_dict` where nothing is logged."""
    del args, kwargs


_LOGS = SharedSettings(*(Exchange(LightningModule, name, _untraced) for name in ("log", "log_dict")), capturing=False)


def divided_at_logs() -> AbstractContextManager[None]:
    """Within the block all forwards that log are divided there."""
    return _LOGS.wanted()
