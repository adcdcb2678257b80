"""What a forward reads outside its arguments may change from step to step: every step sees the present value."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from changing_steps import BATCH, WIDTH, Halves, Outcome, outcome_of
from torch import Tensor, nn

SCALE: Any = 1.0
SETTINGS: dict[str, Any] = {"scale": 1.0, "names": ["sigmoid"]}
_ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [torch.tanh, torch.sigmoid, torch.relu, torch.sin, torch.exp]


class Epoch(Halves):
    current_epoch = 0

    def change(self, k: int) -> None:
        self.current_epoch = k

    def between(self, h: Tensor) -> Tensor:
        return h * (1 + 0.1 * self.current_epoch)


class FloatAttribute(Halves):
    def change(self, k: int) -> None:
        self.scale = 1 / (k + 1)

    def between(self, h: Tensor) -> Tensor:
        return h * self.scale


class Property(Halves):
    class _Trainer:
        global_step = 0

    def change(self, k: int) -> None:
        vars(self).setdefault("trainer", self._Trainer()).global_step = 3 * k

    @property
    def global_step(self) -> int:
        return self.trainer.global_step

    def between(self, h: Tensor) -> Tensor:
        return h * min(1.0, 0.1 + self.global_step / 7)


class StepInLoss(Property):
    """The whole of a training step is captured, its loss weighted by the step."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x).square().mean()
        return loss * 0.5**self.global_step + self.global_step * x.mean()


class ClassAttribute(Halves):
    scale = 1.0

    def change(self, k: int) -> None:
        type(self).scale = 1.0 + k

    def between(self, h: Tensor) -> Tensor:
        return h * self.scale


@dataclass
class Config:
    scale: float = 1.0
    activation: str = "tanh"
    inner: dict[str, Any] = field(default_factory=lambda: {"power": 1})


class ConfigurationObject(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def change(self, k: int) -> None:
        self.config.scale = 1.0 + k
        self.config.activation = ("tanh", "sigmoid")[k % 2]
        self.config.inner["power"] = k + 1

    def between(self, h: Tensor) -> Tensor:
        return getattr(torch, self.config.activation)(h * self.config.scale) ** self.config.inner["power"]


class ConfigurationReplaced(ConfigurationObject):
    def change(self, k: int) -> None:
        self.config = Config(1.0 + k, ("tanh", "sigmoid")[k % 2], {"power": k + 1})


class HyperParameters(Halves):
    """As Lightning's `self.hparams`: a dictionary with attributes."""

    class Attributes(dict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            try:
                return self[name]
            except KeyError as error:
                raise AttributeError(name) from error

    def change(self, k: int) -> None:
        vars(self)["kept"] = self.Attributes(rate=0.5 + k, mode="a" if k % 2 else "b")

    @property
    def hparams(self) -> Any:
        return self.kept

    def between(self, h: Tensor) -> Tensor:
        h = h * self.hparams.rate
        return h.tanh() if self.hparams["mode"] == "a" else h.sigmoid()


class Namespace(Halves):
    def change(self, k: int) -> None:
        self.options = SimpleNamespace(scale=2.0 - k, is_on=bool(k % 2))

    def between(self, h: Tensor) -> Tensor:
        return (h * self.options.scale).tanh() if self.options.is_on else h.sigmoid() * self.options.scale


class Partial(Halves):
    def change(self, k: int) -> None:
        self.does = functools.partial(torch.mul, other=0.5 + k)

    def between(self, h: Tensor) -> Tensor:
        return self.does(h).tanh()


class CallableAttribute(Halves):
    def change(self, k: int) -> None:
        self.does = _ACTIVATIONS[k % len(_ACTIVATIONS)]

    def between(self, h: Tensor) -> Tensor:
        return self.does(h)


class _Scales:
    scale = 1.0

    def __call__(self, h: Tensor) -> Tensor:
        return (h * self.scale).tanh()


class CallableObject(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.does = _Scales()

    def change(self, k: int) -> None:
        self.does.scale = 1.0 + k

    def between(self, h: Tensor) -> Tensor:
        return self.does(h)


class Global(Halves):
    def change(self, k: int) -> None:
        global SCALE
        SCALE = 1.0 + k

    def between(self, h: Tensor) -> Tensor:
        return h * SCALE


class GlobalDictionary(Halves):
    room = 4.0

    def change(self, k: int) -> None:
        SETTINGS["scale"] = 1.0 + k
        SETTINGS["names"][:] = ["sigmoid", "tanh"] * k

    def between(self, h: Tensor) -> Tensor:
        for name in SETTINGS["names"]:
            h = getattr(h, name)()
        return h * SETTINGS["scale"]


class GlobalTensor(Halves):
    def change(self, k: int) -> None:
        global SCALE
        SCALE = torch.full((WIDTH,), 1.0 + k)

    def between(self, h: Tensor) -> Tensor:
        return h * SCALE


def _closure() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    value = 1.0

    def does(h: Tensor) -> Tensor:
        return h * value

    def put(new: float) -> None:
        nonlocal value
        value = new

    return does, put


class Closure(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.does, self.put = _closure()

    def change(self, k: int) -> None:
        self.put(1.0 + k)

    def between(self, h: Tensor) -> Tensor:
        return self.does(h)


class DefaultArgument(Halves):
    @staticmethod
    def does(h: Tensor, scale: float = 1.0) -> Tensor:
        return h * scale

    def change(self, k: int) -> None:
        type(self).does.__defaults__ = (1.0 + k,)

    def between(self, h: Tensor) -> Tensor:
        return self.does(h)


class Environment(Halves):
    def change(self, k: int) -> None:
        os.environ["REMATERIALIZATION_TEST_SCALE"] = str(1.0 + k)

    def between(self, h: Tensor) -> Tensor:
        return h * float(os.environ["REMATERIALIZATION_TEST_SCALE"])


class ArgumentChangedInPlace(Halves):
    """The same list and dictionary in every step, with other contents."""

    options: tuple[list[float], dict[str, Any]] = ([1.0], {"power": 1})

    def batch(self, k: int) -> tuple[Any, ...]:
        self.options[0][:] = [1.0 + k] * (k + 1)
        self.options[1]["power"] = k + 1
        return (*super().batch(k), *self.options)

    def forward(self, x: Tensor, scales: list[float], options: dict[str, Any]) -> Tensor:
        h = self.head(x)
        for scale in scales:
            h = h * scale
        return self.tail(h ** options["power"])


class Arguments(Halves):
    def batch(self, k: int) -> tuple[Any, ...]:
        return (*super().batch(k), 1.0 + k, k, ("tanh", "sigmoid")[k % 2], bool(k % 2), None if k % 2 else k)

    def forward(self, x: Tensor, scale: float, count: int, name: str, is_on: bool, maybe: int | None) -> Tensor:
        h = getattr(torch, name)(self.head(x) * scale)
        for _ in range(count):
            h = h * 0.9
        h = h + 1 if is_on else h
        return self.tail(h if maybe is None else h * (maybe + 1))


class TensorAttribute(Halves):
    def change(self, k: int) -> None:
        self.weights = torch.full((WIDTH,), 1.0 + k)

    def between(self, h: Tensor) -> Tensor:
        return h * self.weights


class RequiresGradBranch(Halves):
    def change(self, k: int) -> None:
        self.tail[0].weight.requires_grad_(k % 2 == 0)

    def between(self, h: Tensor) -> Tensor:
        return h * 2 if self.tail[0].weight.requires_grad else h.tanh()


class ModeOfPart(Halves):
    """A part is put in eval mode now and then, as frozen batch norm is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def change(self, k: int) -> None:
        self.norm.train(k % 2 == 0)
        self.dropout.p = 0.1 * k

    def between(self, h: Tensor) -> Tensor:
        return self.dropout(self.norm(h))


class DefaultDtype(Halves):
    def change(self, k: int) -> None:
        torch.set_default_dtype((torch.float32, torch.float64)[k % 2])

    def between(self, h: Tensor) -> Tensor:
        return h * torch.ones(WIDTH).cumsum(0).sqrt().float()


class Autocast(Halves):
    """Autocast around the module is switched on and off."""

    def change(self, k: int) -> None:
        self.is_on = bool(k % 2)

    def step(self, *batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_on):
            loss = self(*batch).float().square().mean()
        loss.backward()
        return loss


class AutocastWithin(Halves):
    def change(self, k: int) -> None:
        self.is_on = bool(k % 2)

    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_on):
            return self.head(h).float()


class DeterminismFlag(Halves):
    """A global switch of PyTorch that a forward asks for."""

    def change(self, k: int) -> None:
        torch.set_float32_matmul_precision(("highest", "high")[k % 2])

    def between(self, h: Tensor) -> Tensor:
        return h * (2 if torch.get_float32_matmul_precision() == "high" else 1)


class InputSizes(Halves):
    def batch(self, k: int) -> tuple[Any, ...]:
        return (torch.randn(BATCH - 7 * k, WIDTH, generator=torch.Generator().manual_seed(k)),)

    def between(self, h: Tensor) -> Tensor:
        return h / h.shape[0] + len(h)


class SizesOfSlices(InputSizes):
    """A slice that was everything in the first step, and others whose places depend on the sizes."""

    def between(self, h: Tensor) -> Tensor:
        first, last = h[:40].sigmoid(), h[len(h) // 2 :].tanh()
        return (first * h[:40]).exp()[: len(last)] * last[: len(first)] * last.T.exp().T[: len(first)]

    def batch(self, k: int) -> tuple[Any, ...]:
        return super().batch((4, 3, 1, 0, 2)[k])


CASES = [
    Epoch, FloatAttribute, Property, StepInLoss, ClassAttribute, ConfigurationObject, ConfigurationReplaced,
    HyperParameters, Namespace, Partial, CallableAttribute, CallableObject, Global, GlobalDictionary, GlobalTensor,
    Closure, DefaultArgument, Environment, ArgumentChangedInPlace, Arguments, TensorAttribute, RequiresGradBranch,
    ModeOfPart, DefaultDtype, Autocast, AutocastWithin, DeterminismFlag, InputSizes,
    SizesOfSlices,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_step_sees_the_present_value(case: type[Halves], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMATERIALIZATION_TEST_SCALE", "1")
    assert outcome_of(case) is Outcome.EXACT


class Names(Halves):
    """A value that cannot be an input of the graph and is another one in each step."""

    names = tuple(f"{'neg_' * (k % 3)}{k}" for k in range(14))

    def change(self, k: int) -> None:
        self.name = self.names[k]

    def between(self, h: Tensor) -> Tensor:
        return -h if self.name.startswith("neg") else h * len(self.name)


class Depths(Names):
    room = 4.0

    def between(self, h: Tensor) -> Tensor:
        for _ in range(self.names.index(self.name)):
            h = h.sigmoid()
        return h


@pytest.mark.slow
@pytest.mark.parametrize("case", [Names, Depths])
def test_more_values_than_captures_run_plain_with_one_warning(case: type[Halves]) -> None:
    assert outcome_of(case, steps=len(Names.names)) in Outcome.EXACT | Outcome.PARTLY
