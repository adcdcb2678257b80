"""Functions whose results are kept (`functools.lru_cache`) keep them in a rewritten module, too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from changing_steps import BATCH, WIDTH, Halves
from torch import Tensor

from lightning_remat import InfeasibleBudgetError, rematerialize


class Noisy(Halves):
    """Draws its noise once."""

    def __init__(self, noise: Callable[[], Tensor]) -> None:
        super().__init__()
        self.noise = [noise]

    def between(self, h: Tensor) -> Tensor:
        return h + self.noise[0]()


class Projected(Halves):
    """The same by a method."""

    @functools.lru_cache(4)  # noqa: B019
    def projection(self, width: int) -> Tensor:
        return torch.randn(width, width)

    def between(self, h: Tensor) -> Tensor:
        return h @ self.projection(WIDTH)


def outputs(module: Halves, is_rewritten: bool) -> tuple[list[Tensor], Tensor]:
    """Those of some steps, and where the generator stands then."""
    torch.manual_seed(1)
    module(*module.batch(0))  # draws
    if is_rewritten:
        with pytest.raises(InfeasibleBudgetError) as caught:
            rematerialize(module, *module.batch(0), memory_budget=1)
        plan: Any = rematerialize(module, *module.batch(0), memory_budget=caught.value.sufficient_bytes)
        assert plan.step.num_recomputed
    return [module(*module.batch(k)) for k in range(3)], torch.get_rng_state()


def noisy() -> Halves:
    return Noisy(functools.lru_cache(None)(lambda: torch.randn(BATCH, WIDTH)))


@pytest.mark.slow
@pytest.mark.parametrize("make", [noisy, Projected])
def test_what_is_kept_is_drawn_once(make: Callable[[], Halves]) -> None:
    found: list[tuple[list[Tensor], Tensor]] = []
    for is_rewritten in (False, True):
        torch.manual_seed(0)
        found.append(outputs(make(), is_rewritten))
    (plain, state), (ours, other) = found
    assert len(plain) == len(ours)
    assert all(map(torch.equal, plain, ours))
    assert torch.equal(state, other)
