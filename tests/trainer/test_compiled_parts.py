"""Modules that `torch.compile` was given stay as they are; what is around them is planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from remat_runs import run
from same_runs import Deep, assert_same_run, deep, remat
from torch import Tensor, fx, nn

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]

compilations: list[int] = []


def counting(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    compilations.append(len(graph.graph.nodes))
    return graph.forward


class CompiledHead(Deep):
    """A part of it is made anew by `torch.compile`."""

    def __init__(self) -> None:
        super().__init__()
        self.head: Any = torch.compile(deep(depth=2), backend=counting)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.net(batch[0])).square().mean()


class HeadCompiledInPlace(CompiledHead):
    def __init__(self) -> None:
        super().__init__()
        self.head = deep(depth=2)
        self.head.compile(backend=counting)


class CalledByTheForward(CompiledHead):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x) * 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("case", [CompiledHead, HeadCompiledInPlace, CalledByTheForward])
def test_the_run_is_the_same(tmp_path: Path, case: type[CompiledHead]) -> None:
    torch.compiler.reset()
    run(tmp_path, case(), max_steps=2)
    plain = set(compilations)
    torch.compiler.reset()
    compilations.clear()
    result = assert_same_run(tmp_path, case, callback=remat(planner="auto", memory_budget="85%")).result
    assert result is not None
    assert {key.partition("[")[0] for key in result.step.keys} <= {"", "net"}
    assert {*compilations} == plain  # nothing of ours is compiled into it
    compilations.clear()


@torch.compile(backend=counting, fullgraph=True)
def through(part: nn.Module, x: Tensor) -> Tensor:
    return part(x).square().mean()


class CalledBothWays(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return through(self.net, batch[0]) + self.net(batch[0] * 2).sin().mean()


class CalledByACompiledFunction(Deep):
    """That breaks at nothing of ours, as a compiler may round otherwise for each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.head = deep()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return through(self.head, self.net(batch[0]))


@pytest.mark.slow
@pytest.mark.parametrize("case", [CalledByACompiledFunction, CalledBothWays])
def test_what_a_compiled_function_calls_is_left_to_it(tmp_path: Path, case: type[Deep]) -> None:
    def anew() -> Deep:  # what looks on would be in none that is compiled already
        torch.compiler.reset()
        return case()

    compilations.clear()
    run(tmp_path, anew(), max_steps=2)
    plain = set(compilations)
    result = assert_same_run(tmp_path, anew, callback=remat(planner="auto", memory_budget="85%")).result
    assert result is not None
    assert result.step.keys == ("net",)
    assert {*compilations} == plain


class AllByACompiledFunction(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return through(self.net, batch[0])


def test_where_a_compiled_function_calls_all_it_is_left(tmp_path: Path) -> None:
    torch.compiler.reset()
    with pytest.warns(
        UserWarning, match="leaves the model as it is: .* or only where it stays as it is, in compiled functions"
    ):
        run(tmp_path, AllByACompiledFunction(), remat(), max_steps=2)


class AllCompiled(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = torch.compile(self.net, backend="eager")


class AllCompiledInPlace(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.net.compile(backend="eager")


@pytest.mark.parametrize("case", [AllCompiled, AllCompiledInPlace])
def test_where_all_is_compiled_it_is_refused(tmp_path: Path, case: type[Deep]) -> None:
    with pytest.raises(MisconfigurationException, match=r"net is compiled, .*: remove torch\.compile"):
        run(tmp_path, case(), remat())
