"""Processes that run a step together look at it equally often, so that none waits in vain for what others exchange."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_remat.module_state.agreement import OtherRankError
from lightning_remat.regions.look_through import look_through

SEEN, OUTDATED, DIFFERENTIATES, FAILED = range(4)


class Others:
    """Other processes, and what the gravest of them says after each look."""

    def __init__(self, *says: int) -> None:
        self.says = iter(says)
        self.heard: list[int] = []

    def agree(self, value: int) -> int:
        self.heard.append(value)
        return max(value, next(self.says))


def counted_step(net: nn.Module) -> tuple[list[None], Callable[[], Tensor]]:
    """A step, and an entry for each of its runs."""
    runs: list[None] = []

    def step() -> Tensor:
        runs.append(None)
        return net(torch.ones(4, 8))

    return runs, step


def test_all_look_again_where_one_has_to() -> None:
    others, (runs, step) = Others(OUTDATED, OUTDATED, SEEN), counted_step(net := nn.Linear(8, 8))
    assert look_through(nn.Sequential(net), step, agree=others.agree).calls
    assert others.heard == [SEEN] * 3
    assert len(runs) == 3


def test_all_hold_what_is_saved_where_one_differentiates() -> None:
    others, (runs, step) = Others(DIFFERENTIATES, SEEN), counted_step(net := nn.Linear(8, 8))
    assert look_through(nn.Sequential(net), step, agree=others.agree).differentiates
    assert others.heard == [SEEN] * 2
    assert len(runs) == 2


def test_a_failure_elsewhere_ends_all() -> None:
    others, (_, step) = Others(FAILED), counted_step(net := nn.Linear(8, 8))
    with pytest.raises(OtherRankError, match="on another process"):
        look_through(nn.Sequential(net), step, agree=others.agree)


def test_a_failure_here_is_told_to_others() -> None:
    def step() -> None:
        raise ArithmeticError("of this process")

    others = Others(SEEN)
    with pytest.raises(ArithmeticError, match="of this process"):
        look_through(nn.Sequential(nn.Linear(8, 8)), step, agree=others.agree)
    assert others.heard == [FAILED]
