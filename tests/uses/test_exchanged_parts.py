"""Parts of a module that the user exchanges between steps, and random numbers of the user's own."""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from changing_steps import BATCH, WIDTH, Halves, Outcome, outcome_of, slow, stack
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class ParameterReplaced(Halves):
    def change(self, k: int) -> None:
        torch.manual_seed(k)
        self.head[0].weight = nn.Parameter(torch.randn(WIDTH, WIDTH))


class ParameterResized(Halves):
    """A layer grows, as vocabularies and prompts do."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.zeros(1, WIDTH))

    def change(self, k: int) -> None:
        self.prompt = nn.Parameter(torch.linspace(0, 1, (k + 1) * WIDTH).view(k + 1, WIDTH))

    def between(self, h: Tensor) -> Tensor:
        return h @ torch.cat([self.prompt, torch.ones(WIDTH, WIDTH)]).T @ torch.ones(len(self.prompt) + WIDTH, WIDTH)


class BufferReplaced(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def change(self, k: int) -> None:
        self.scale = torch.full((1 + (k % 2) * (WIDTH - 1),), 1.0 + k)

    def between(self, h: Tensor) -> Tensor:
        return h * self.scale


class Frozen(Halves):
    def change(self, k: int) -> None:
        self.head.requires_grad_(k % 2 == 0)
        self.tail[0].bias.requires_grad_(k > 2)


class _Low(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def _adapted(layer: nn.Linear, low: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.linear(x, layer.weight, layer.bias) + low(x)


class ForwardReplaced(Halves):
    """LoRA: the forward of a layer is another from step 2 on, and its own again from step 4 on."""

    def __init__(self) -> None:
        super().__init__()
        self.low = _Low()

    def change(self, k: int) -> None:
        vars(self.head[2]).pop("forward", None)
        if k in (2, 3):
            self.head[2].forward = partial(_adapted, self.head[2], self.low)


class ForwardReplacedFirst(ForwardReplaced):
    def change(self, k: int) -> None:
        super().change(2 if k < 3 else 0)


class LayerReplaced(Halves):
    def change(self, k: int) -> None:
        torch.manual_seed(k)
        self.head[1] = (nn.Tanh(), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH))[k % 3]


class Reordered(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid()])

    def change(self, k: int) -> None:
        layers = sorted(self.layers, key=lambda m: str(m))
        self.layers = nn.ModuleList(layers[k % 4 :] + layers[: k % 4])

    def between(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return h


class Grows(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([stack(1)])

    def change(self, k: int) -> None:
        torch.manual_seed(k)
        self.layers = nn.ModuleList(stack(1) for _ in range(k + 1))

    def between(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return h


class Tied(Halves):
    def change(self, k: int) -> None:
        torch.manual_seed(k)
        self.tail[0].weight = self.head[0].weight if k % 2 else nn.Parameter(torch.randn(WIDTH, WIDTH))


class HooksComeAndGo(Halves):
    def change(self, k: int) -> None:
        self.head[0]._forward_hooks.clear()
        if k % 2:
            self.head[0]._forward_hooks[0] = _doubled


def _doubled(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output * 2


class ShallowCopy(Halves):
    """Trains a `copy.copy` of itself, which shares parameters."""

    scale = 1.0

    def change(self, k: int) -> None:
        self.scale = 1.0 + k

    def between(self, h: Tensor) -> Tensor:
        return h * self.scale

    def step(self, *batch: Any) -> Tensor:
        other = copy.copy(self)
        other.scale = 3 * self.scale
        loss = other(*batch).square().mean() + self(*batch).square().mean()
        loss.backward()
        return loss


class GlobalGenerators(Halves):
    def between(self, h: Tensor) -> Tensor:
        factors = [0.5, 1.0, 1.5, 2.0]
        random.shuffle(factors)
        h = h * (factors[0] + random.random()) + float(np.random.rand())  # noqa: NPY002
        return nn.functional.dropout(h, 0.3) + torch.rand_like(h)


class OwnGenerator(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def __deepcopy__(self, memo: Any) -> OwnGenerator:
        made = type(self)()
        made.load_state_dict(self.state_dict())
        return made

    def between(self, h: Tensor) -> Tensor:
        return h * torch.rand(h.shape, generator=self.generator)


class OwnNumpyGenerator(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(5)

    def between(self, h: Tensor) -> Tensor:
        return h * float(self.generator.random()) + torch.from_numpy(self.generator.random(WIDTH)).float()


class OwnPythonGenerator(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(5)

    def between(self, h: Tensor) -> Tensor:
        return h * self.generator.random() + self.generator.randint(1, 4)


class RandomDepth(Halves):
    """Blocks are left out at random; the last may return its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(stack(1) for _ in range(4))

    def between(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) > 0.5:
                h = h + block(h)
        return h


class _Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = stack(1)

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(1) < 0.5 else x + self.f(x)


class ReturnsItsInput(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_Skips() for _ in range(3)))

    def between(self, h: Tensor) -> Tensor:
        return self.blocks(h)


class LayerDrop(RandomDepth):
    def between(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() > 0.5:
                h = h + block(h)
        return h


class Recurrent(Halves):
    """Sequences of several lengths; the states that an LSTM returns beside them are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, 2 * WIDTH, 2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def batch(self, k: int) -> tuple[Any, ...]:
        return (torch.randn(BATCH // 4, 5 + 3 * k, WIDTH, generator=torch.Generator().manual_seed(k)),)

    def between(self, h: Tensor) -> Tensor:
        return self.out(self.rnn(h.tanh())[0])


class Packed(Recurrent):
    def batch(self, k: int) -> tuple[Any, ...]:
        lengths = torch.tensor([5 + 3 * k - n % (3 + k) for n in range(BATCH // 4)])
        return (*super().batch(k), lengths)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.head(x), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.tail(self.out(out))


CASES = [
    ParameterReplaced, ParameterResized, BufferReplaced, Frozen, ForwardReplaced, ForwardReplacedFirst, LayerReplaced,
    Reordered, Grows, Tied, GlobalGenerators, OwnGenerator, slow(OwnNumpyGenerator), RandomDepth,
    slow(ReturnsItsInput), LayerDrop, slow(Recurrent), slow(Packed),
    HooksComeAndGo, ShallowCopy, OwnPythonGenerator,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_parts_are_those_of_the_step(case: type[Halves]) -> None:
    assert outcome_of(case) is Outcome.EXACT
