"""What an operation's backward needs beyond its gradients, by how its growth of memory depends on what is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def backward_costs(
    growth: Callable[..., int], peak_bytes: int, accounted_bytes: int, *, has_several: bool, reads_own: bool
) -> dict[str, Any]:
    """The fields of a node that say what its backward needs beyond the gradients that it is given and makes.

    Args:
        growth: Growth of memory in the backward, by how it is run (`_growth_again`).
        peak_bytes: That where nothing is held or released.
        accounted_bytes: Those gradients.
        has_several: Whether it consists of several operations.
        reads_own: Whether it reads its output or tape.
    """
    alone = max(peak_bytes, accounted_bytes)
    shared = max(alone, growth(holds=True)) if has_several else alone
    release = max(0, alone - growth(releases=True)) if reads_own else 0
    shared_release = max(0, shared - growth(releases=True, holds=True)) if has_several and reads_own else release
    return {
        "backward_workspace_bytes": alone - accounted_bytes,
        "backward_release_bytes": release,
        "backward_shared_bytes": shared - alone,
        "backward_shared_release_bytes": shared_release,
    }
