"""Values of a call on which a profile may run operations, so that the module and its hooks know nothing of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def apart(value: Any, *, is_written: bool) -> Any:
    """A value of the call to run on: what is written is a copy, what has hooks or a history a twin in its memory."""
    if not isinstance(value, Tensor):
        return value
    has_hooks = getattr(value, "_backward_hooks", None) or getattr(value, "_post_accumulate_grad_hooks", None)
    if not is_written and not has_hooks and value.is_leaf:
        return value
    twin = value.detach().clone() if is_written else value.detach()
    if isinstance(value, nn.Parameter):
        return nn.Parameter(twin, value.requires_grad)
    return twin.requires_grad_(value.requires_grad)
