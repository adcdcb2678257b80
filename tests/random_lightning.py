"""Random LightningModules, with trainers: what a step calls, in what order, what it changes and who hooks in."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset

WIDTH, BATCH, CLASSES = 12, 16, 3


class Block(nn.Module):
    """Layers of one of the `BLOCKS`."""

    scale: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.layer_norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return BLOCKS[self.kind](self, x)


def _counts(m: Block, x: Tensor) -> Tensor:
    m.calls += 1
    return m.first(x).tanh() * (1 + 0.01 * (m.calls % 3))


def _is_left_out(m: Block, x: Tensor) -> Tensor:
    return x if m.training and random.random() < 0.5 else x + m.second(m.first(x).tanh()).tanh()


def _follows(m: Block, x: Tensor) -> Tensor:
    if m.training:
        with torch.no_grad():
            m.scale.mul_(0.9).add_(x.abs().mean(0), alpha=0.1)
    return (m.first(x) / (m.scale + 1)).tanh()


def _decides(m: Block, x: Tensor) -> Tensor:
    return m.first(x).tanh() if x.mean() > 0 else m.second(x).sigmoid()


def _writes(m: Block, x: Tensor) -> Tensor:
    h = m.first(x).tanh_() * 1.5
    return h.add_(x)


BLOCKS: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "plain": lambda m, x: m.first(x).tanh(),
    "residual": lambda m, x: x + m.dropout(m.first(m.layer_norm(x)).sigmoid()),
    "normed": lambda m, x: m.norm(m.first(x)).tanh(),
    "noisy": lambda m, x: (m.first(x) + 0.1 * torch.randn_like(x)).tanh(),
    "noisy by numpy": lambda m, x: m.first(x).tanh() * float(np.random.rand()),  # noqa: NPY002
    "gates": lambda m, x: m.first(x) * functional.gumbel_softmax(m.second(x)),
    "counts": _counts,
    "is left out": _is_left_out,
    "follows": _follows,
    "decides": _decides,
    "writes": _writes,
}


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Draws random numbers for each sample."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, WIDTH, generator=generator)
        self.y = torch.randint(CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.01 * torch.randn(WIDTH) * random.choice([0.5, 1.0]), self.y[index]


@dataclass(frozen=True)
class Recipe:
    """What a random module does.

    Attributes:
        blocks: Of its network, see `BLOCKS`.
        logits: How it is called, see `LOGITS`.
        terms: Of the loss beside the first, see `TERMS`.
        optimization: By whom, see `OPTIMIZATIONS`; None for the trainer.
        hooks: Of the module, see `HOOKS`.
        optimizer: Its name.
        schedule: Of the learning rate, for each epoch.
        samples: How many there are.
    """

    blocks: tuple[str, ...]
    logits: str
    terms: frozenset[str]
    optimization: str | None
    hooks: frozenset[str]
    optimizer: str
    schedule: bool
    samples: int


class RandomLightning(LightningModule):
    """Trains as its recipe says."""

    bank: Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe, self.automatic_optimization = recipe, recipe.optimization is None
        self.net = nn.Sequential(*map(Block, recipe.blocks))
        self.head, self.recurrent = nn.Linear(WIDTH, CLASSES), nn.GRU(WIDTH, WIDTH)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("bank", torch.zeros(8, WIDTH))
        self.hidden: Tensor | None = None
        self.seen: list[Any] = []
        if "gradient" in recipe.hooks:
            halve: Callable[[Tensor], Tensor] = lambda gradient: gradient * 0.5  # noqa: E731
            self.head.weight.register_hook(halve)  # pyright: ignore[reportUnknownMemberType]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def loss_of(self, batch: Any) -> Tensor:
        x, y = batch
        loss = functional.cross_entropy(LOGITS[self.recipe.logits](self, x), y)
        for term in sorted(self.recipe.terms):
            loss = loss + TERMS[term](self, x, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.seen.append(loss.detach())
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.recipe.optimization is None:
            return self.loss_of(batch)
        OPTIMIZATIONS[self.recipe.optimization](self, self.optimizers(), batch, batch_idx)
        return None

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        made: Any = getattr(torch.optim, self.recipe.optimizer)(parameters, 0.01)
        return ([made], [lr_scheduler.StepLR(made, 1, 0.5)]) if self.recipe.schedule else made

    def train_dataloader(self) -> Any:
        return DataLoader(Augmented(self.recipe.samples), batch_size=BATCH, shuffle=True)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            if "freezes" in self.recipe.hooks:
                self.net[0].requires_grad_(False)
            if "drops more" in self.recipe.hooks:
                for module in self.net.modules():
                    if isinstance(module, nn.Dropout):
                        module.p = 0.3
            if "loads" in self.recipe.hooks:
                self.net.load_state_dict(self.teacher.state_dict())
            if "exchanges" in self.recipe.hooks:
                self.net[0] = copy.deepcopy(self.net[-1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if "ends early" in self.recipe.hooks and self.current_epoch == 0 and batch_idx == 2 else None

    def on_after_backward(self) -> None:
        if "noise" in self.recipe.hooks:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.add_(torch.randn_like(parameter.grad), alpha=1e-3)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if "teaches" in self.recipe.hooks:
            with torch.no_grad():
                for teacher, own in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                    teacher.lerp_(own, 0.1)

    def on_train_start(self) -> None:
        if "evaluates a part" in self.recipe.hooks:
            self.net[-1].eval()


def _by_a_penalty(m: RandomLightning, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    logits = m(x)
    (gradient,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
    return logits + gradient.square().mean()


LOGITS: dict[str, Callable[[RandomLightning, Tensor], Tensor]] = {
    "as a whole": lambda m, x: m(x),
    "twice": lambda m, x: m(x) + m(x + 0.1),
    "in parts": lambda m, x: m.head(m.net(x) / 2),
    "both ways": lambda m, x: m(x) + m.head(m.net(x.flip(0))),
    "in pieces": lambda m, x: torch.cat([m(part) for part in torch.split(x, 5)]),
    "by a penalty": _by_a_penalty,
    "scaled in place": lambda m, x: m(x.mul_(0.5)),
}


def _beside_the_teacher(m: RandomLightning, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.teacher(x)
    return functional.mse_loss(m.net(x), target)


def _beside_itself(m: RandomLightning, x: Tensor, y: Tensor) -> Tensor:
    out = m.net(x)
    with torch.no_grad():
        target = m.net(x + 0.1)
    return functional.mse_loss(out, target)


def _banked(m: RandomLightning, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.bank[m.global_step % 8] = m.net(x).mean(0)
    return 0.1 * m.head(m.bank).mean()


def _recurrent(m: RandomLightning, x: Tensor, y: Tensor) -> Tensor:
    out, hidden = m.recurrent(m.net(x)[None, :3], m.hidden)
    m.hidden = hidden.detach()
    return out.square().mean()


def _under_autocast(m: RandomLightning, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.net(x).float().square().mean()


TERMS: dict[str, Callable[[RandomLightning, Tensor, Tensor], Tensor]] = {
    "beside the teacher": _beside_the_teacher,
    "beside itself": _beside_itself,
    "banked": _banked,
    "recurrent": _recurrent,
    "under autocast": _under_autocast,
    "of a part": lambda m, x, y: m.net[0](x).square().mean(),
    "of few": lambda m, x, y: m.net(x[: 3 + m.global_step % 5]).square().mean(),
    "rarely": lambda m, x, y: m.net(x).mean() if m.global_step % 3 == 2 else x.new_zeros(()),
    "of weights": lambda m, x, y: 1e-3 * torch.stack([p.square().sum() for p in m.net.parameters()]).sum(),
}


def _once(m: RandomLightning, optimizer: Any, batch: Any, batch_idx: int) -> None:
    optimizer.zero_grad()
    m.manual_backward(m.loss_of(batch))
    optimizer.step()


def _accumulating(m: RandomLightning, optimizer: Any, batch: Any, batch_idx: int) -> None:
    m.manual_backward(m.loss_of(batch) / 2)
    if batch_idx % 2:
        m.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        optimizer.zero_grad()


def _retaining(m: RandomLightning, optimizer: Any, batch: Any, batch_idx: int) -> None:
    loss = m.loss_of(batch)
    optimizer.zero_grad()
    m.manual_backward(loss, retain_graph=True)
    m.manual_backward(loss * 0.5)
    optimizer.step()


def _by_a_closure(m: RandomLightning, optimizer: Any, batch: Any, batch_idx: int) -> None:
    def closure() -> Tensor:
        loss = m.loss_of(batch)
        optimizer.zero_grad()
        m.manual_backward(loss)
        return loss

    optimizer.step(closure=closure)


def _sharpness_aware(m: RandomLightning, optimizer: Any, batch: Any, batch_idx: int) -> None:
    optimizer.zero_grad()
    m.manual_backward(m.loss_of(batch))
    moved = [(p, 0.05 * p.grad) for p in m.parameters() if p.grad is not None]
    with torch.no_grad():
        for parameter, by in moved:
            parameter.add_(by)
    optimizer.zero_grad()
    m.manual_backward(m.loss_of(batch))
    with torch.no_grad():
        for parameter, by in moved:
            parameter.sub_(by)
    optimizer.step()


OPTIMIZATIONS: dict[str, Callable[[RandomLightning, Any, Any, int], None]] = {
    "once": _once,
    "accumulating": _accumulating,
    "retaining": _retaining,
    "by a closure": _by_a_closure,
    "sharpness-aware": _sharpness_aware,
}
HOOKS = [
    "gradient", "freezes", "drops more", "loads", "exchanges", "ends early", "noise", "teaches", "evaluates a part",
]  # fmt: skip


@st.composite
def recipes(draw: st.DrawFn) -> tuple[Recipe, dict[str, Any]]:
    """A module and the options of its trainer."""
    optimization = draw(st.none() | st.sampled_from(sorted(OPTIMIZATIONS)))
    recipe = Recipe(
        blocks=tuple(draw(st.lists(st.sampled_from(sorted(BLOCKS)), min_size=3, max_size=6))),
        logits=draw(st.sampled_from(sorted(LOGITS))),
        terms=draw(st.frozensets(st.sampled_from(sorted(TERMS)), max_size=3)),
        optimization=optimization,
        hooks=draw(st.frozensets(st.sampled_from(HOOKS), max_size=3)),
        optimizer=draw(st.sampled_from(["SGD", "Adam", "RMSprop"])),
        schedule=draw(st.booleans()),
        samples=draw(st.sampled_from([3 * BATCH, 4 * BATCH - 5])),
    )
    options: dict[str, Any] = {"max_epochs": 2, "max_steps": -1}
    if optimization is None:
        options |= draw(st.sampled_from([{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}]))
    return recipe, options | draw(st.sampled_from([{}, {}, {"precision": "bf16-mixed"}, {"detect_anomaly": True}]))
