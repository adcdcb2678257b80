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
from changing_steps import WIDTH, Halves, Outcome, outcome_of
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


class Method(Halves):
    """Is replaced in the class, as patches of libraries do."""

    def scaled(self, h: Tensor) -> Tensor:
        return h

    def change(self, k: int) -> None:
        type(self).scaled = lambda self, h: h * (1 + 0.1 * k)  # pyright: ignore[reportAttributeAccessIssue]

    def between(self, h: Tensor) -> Tensor:
        return self.scaled(h)


class MethodOfTheClass(Halves):
    @classmethod
    def scaled(cls, h: Tensor) -> Tensor:
        return h

    def change(self, k: int) -> None:
        type(self).scaled = classmethod(lambda cls, h: h * (1 + 0.1 * k))  # pyright: ignore[reportAttributeAccessIssue]

    def between(self, h: Tensor) -> Tensor:
        return self.scaled(h)


class _Activation(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.tanh()


class _Steeper(_Activation):
    pass


_FORWARDS: list[Any] = [lambda self, h: h.sin(), lambda self, h: h.sigmoid()]


class ForwardOfAPart(Halves):
    """Comes back, too."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = _Steeper()

    def change(self, k: int) -> None:
        _Activation.forward = _FORWARDS[k % 2]

    def between(self, h: Tensor) -> Tensor:
        return self.activation(h)


class ForwardOfAPartBehindABreak(ForwardOfAPart):
    def between(self, h: Tensor) -> Tensor:
        torch._dynamo.graph_break()  # pyright: ignore[reportPrivateUsage]
        return self.activation(h)


CASES = [
    Epoch, FloatAttribute, Property, StepInLoss, ClassAttribute, ConfigurationObject, ConfigurationReplaced,
    HyperParameters, Namespace, Partial, CallableAttribute, CallableObject, Global, GlobalDictionary, GlobalTensor,
    Closure, DefaultArgument, Environment, Method, MethodOfTheClass, ForwardOfAPart, ForwardOfAPartBehindABreak,
]  # fmt: skip


@pytest.mark.slow
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
