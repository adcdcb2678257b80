"""A small module, and uses of it compared with those of the plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from rewriting import recomputing_copy
from torch import nn

X = torch.randn(10, 6)


def chain(depth: int = 4) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.BatchNorm1d(6), nn.Sigmoid()) for _ in range(depth))
    )


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def compared(use: Callable[[nn.Module], list[Any]], module: nn.Module | None = None) -> None:
    """What `use` returns is the same for a plain module and for one that recomputes everything."""
    plain = chain() if module is None else module
    results = []
    for m in (copy.deepcopy(plain), recomputing_copy(plain, X)):
        torch.manual_seed(3)
        results.append([*use(m), *(p.grad for p in m.parameters()), *m.buffers(), torch.get_rng_state()])
    assert same(*results)
