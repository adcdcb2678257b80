"""What stands in the place of functions: subclasses of tensors, and modes, with `__torch_function__` of their own."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from same_runs import Deep, assert_same_run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from torchvision import tv_tensors
from training_steps import assert_equal_traces, loss_of, traces

from lightning_remat import TraceError, rematerialize

X = torch.randn(32, 16)


def layers() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2))))


class Scaled(nn.Parameter):
    """Of which layers compute something else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        return found * 1.25 if func is F.linear else found


class Named(Tensor):
    """Of which operations make others of its kind."""


class Stored(Tensor):
    """Is stored as whole numbers, and known to layers alone, as a quantized weight is."""

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Stored:
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Stored:
        return Stored(inner["numbers"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *rest = args
            return F.linear(x, weight.numbers / 64, *rest)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default):
            return cls(func(args[0].numbers))
        raise NotImplementedError(f"{func} of a stored weight")


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is F.linear else found


def scaled() -> nn.Sequential:
    module = layers()
    for layer in module[::6]:
        layer.weight = Scaled(layer.weight.detach())
    return module


def stored() -> nn.Sequential:
    module = layers()
    for layer in module[::6]:
        numbers = (layer.weight.detach() * 64).round().to(torch.int8)
        layer.weight = nn.Parameter(Stored(numbers), requires_grad=False)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "kind"),
    [(stored, Tensor), *itertools.product([layers, scaled], [Tensor, Named, tv_tensors.Mask])],
)
def test_subclasses_do_in_a_recomputation_what_they_did_at_first(
    make: Callable[[], nn.Module], kind: type[Tensor]
) -> None:
    module = make()
    plain = copy.deepcopy(module)
    plan = rematerialize(module, X.as_subclass(kind), memory_budget="80%", planner="periodic")
    assert plan.num_recomputed
    batches = [X.as_subclass(kind), X, X.as_subclass(kind)]
    assert_equal_traces(traces(plain, batches), traces(module, batches))
    assert_equal_traces(traces(plain, batches, step=apart), traces(module, batches, step=apart))


def apart(module: nn.Module, batch: Tensor) -> Tensor:
    """A step whose backward is a function of a subclass, so that what it calls in turn is none."""
    loss = loss_of(module(batch))
    loss.as_subclass(Named).backward()
    return loss


def under(mode: Callable[[], TorchFunctionMode]) -> Callable[[nn.Module, Tensor], Tensor]:
    def step(module: nn.Module, batch: Tensor) -> Tensor:
        with mode():
            loss = loss_of(module(batch))
        loss.backward()
        return loss

    return step


def test_a_mode_acts_once() -> None:
    module = layers()
    plain = copy.deepcopy(module)
    with Doubles(), pytest.raises(TraceError, match="Doubles is active"):
        rematerialize(module, X, memory_budget="80%", planner="periodic")
    rematerialize(module, X, memory_budget="80%", planner="periodic")
    expected = traces(plain, [X, X], step=under(Doubles))
    with pytest.warns(UserWarning, match="runs without rematerialization because .*Doubles is active"):
        found = traces(module, [X, X], step=under(Doubles))
    assert_equal_traces(expected, found)


def test_a_default_device_is_none_that_is_in_the_way() -> None:
    module = layers()
    plain = copy.deepcopy(module)
    rematerialize(module, X, memory_budget="80%", planner="periodic")
    expected = traces(plain, [X, X], step=under(lambda: torch.device("cpu")))  # pyright: ignore
    with warnings.catch_warnings(action="error", category=UserWarning):
        found = traces(module, [X, X], step=under(lambda: torch.device("cpu")))  # pyright: ignore
    assert_equal_traces(expected, found)


class Counts(Deep):
    """As who wants to know how many operations a step is."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with FlopCounterMode(display=False) as counter:
            loss = super().training_step(batch, batch_idx)
        self.log("flops", float(counter.get_total_flops()))
        return loss


class Twice(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with Doubles():
            return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Counts, Twice])
@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*")
def test_a_training_step_under_a_mode_is_left_as_it_is(tmp_path: Path, case: type[Deep]) -> None:
    with pytest.warns(UserWarning, match="leaves the model as it is: .* where it stays as it is, in .* modes"):
        assert_same_run(tmp_path, case, is_planned=False)
