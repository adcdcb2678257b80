"""Which objects are no more than what they hold, so that they are looked into, put back and copied."""

from __future__ import annotations

from typing import Any, cast

from torch.utils.data import DataLoader, Dataset

LEFT_ALONE = (
    "lightning_remat",  # a plan in force keeps what it has learnt
    "lightning",
    "pytorch_lightning",
    "torch",
    "triton",
    "logging",
    "threading",
    "multiprocessing",
    "concurrent",
    "asyncio",
    "subprocess",
    "weakref",
    "tqdm",
    "rich",
)
"""Libraries whose objects are not plain: they stand for devices, processes, screens, or hold the whole trainer."""

_PLAIN_IN_TORCH = ("torch.optim", "torch.amp.grad_scaler", "torch.cuda.amp.grad_scaler")


def is_plain(value: Any) -> bool:
    """Whether an object is no more than its attributes, as far as can be told."""
    if isinstance(value, (Dataset, DataLoader)) or callable(getattr(cast(Any, type(value)), "__next__", None)):
        return False
    module = type(value).__module__
    return module.startswith(_PLAIN_IN_TORCH) or module.partition(".")[0] not in LEFT_ALONE
