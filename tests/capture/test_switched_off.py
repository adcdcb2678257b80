"""Where TorchDynamo is switched off, by whichever switch, or would look past something, steps are plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import config
from training_steps import loss_of

from lightning_remat import TraceError, rematerialize, trace

X = torch.randn(32, 8)


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()) for _ in range(8)))


class Environment:
    """`TORCHDYNAMO_DISABLE=1`."""

    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv("TORCHDYNAMO_DISABLE", "1")

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "TORCHDYNAMO_DISABLE=1": Environment,
    "torch._dynamo.config.disable": lambda: config.patch(disable=True),
    'torch.compiler.set_stance("force_eager")': lambda: torch.compiler.set_stance("force_eager"),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_the_switch_is_named(switch: str) -> None:
    with SWITCHES[switch]():
        with pytest.raises(ValueError, match=r"cannot rematerialize: TorchDynamo, .* is switched off by") as refused:
            rematerialize(blocks(), X, memory_budget="80%", planner="periodic")
        with pytest.raises(TraceError, match="is switched off by") as not_captured:
            trace(blocks(), X)
    for error in (refused, not_captured):
        assert switch in str(error.value)
        assert str(error.value).endswith("Remedy: leave it on where plans are made and run")


def test_a_planned_module_says_that_it_runs_plain_under_the_stance() -> None:
    plain = blocks()
    ours = copy.deepcopy(plain)
    assert rematerialize(ours, X, memory_budget="80%", planner="periodic").num_recomputed
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.warns(UserWarning, match="because .*force_eager.* is in force"),
    ):
        made = ours(X)
    loss_of(made).backward()
    loss_of(plain(X)).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), ours.parameters(), strict=True))  # pyright: ignore


def test_where_all_modules_are_called_otherwise_the_plain_forward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = blocks()
    ours = copy.deepcopy(plain)
    assert rematerialize(ours, X, memory_budget="80%", planner="periodic").num_recomputed

    def doubled(self: Any, *args: Any) -> Any:
        return 2 * self._call_impl(*args)

    monkeypatch.setattr(nn.Module, "__call__", doubled)
    with pytest.warns(UserWarning, match="Module.__call__ has been replaced"):
        made = ours(X)
    assert torch.equal(made, plain(X))
