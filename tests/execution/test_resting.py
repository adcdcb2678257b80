"""What autograd holds as it was handed over rests from the second step on: as plain autograd, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from resting_cases import Between, rested, rested_results, rested_tapes, resting_copy
from rewriting import recomputing_copy
from torch import Tensor, nn
from training_steps import assert_equal_traces, loss_of, traces
from uses import same

from lightning_remat import profile, trace

X = torch.randn(4, 6)


def assert_rests_as_plain(module: nn.Module, batches: Sequence[Tensor], *, at_least: int = 1) -> None:
    """Steps with what rests are the plain ones."""
    ours = resting_copy(module, batches[0])
    assert_equal_traces(traces(copy.deepcopy(module), batches), traces(ours, batches))
    assert rested(ours) >= at_least


CHAINS: dict[str, Callable[[Between, Tensor], Tensor]] = {
    "linear": lambda m, x: m.c(F.gelu(m.b(F.gelu(m.a(x))))),
    "layer norm": lambda m, x: m.c(F.gelu(F.layer_norm(m.b(F.silu(m.a(x))), (6,)))),
    "view": lambda m, x: m.c(F.gelu(m.a(x)).view(-1, 2, 3).flatten(1)) * m.b(x),
    "views of views": lambda m, x: (
        (h := F.gelu(m.a(x)).view(-1, 2, 3)).transpose(1, 2)[:, :2] * h[:, :, :2]
    ).sigmoid(),
    "views of which one is read later": lambda m, x: m.b(h := F.gelu(m.a(x))).sigmoid().mul(h[:, :6]) * h.view(-1, 6),
    "chunks": lambda m, x: m.c(torch.cat([(h := F.gelu(m.a(x)).chunk(2, 1))[0] * h[1].sigmoid(), h[1]], 1)),
    "items": lambda m, x: m.c(
        torch.stack([(h := F.gelu(m.a(x)).view(-1, 3, 2).unbind(1))[0] * h[1], *h[1:]], 1).view(-1, 6)
    ),
    "in place": lambda m, x: m.c(F.relu(m.a(x), inplace=True)) * m.b(x).sin().mul_(2).sigmoid(),
    "residual": lambda m, x: m.c((h := F.gelu(m.a(x))) + F.gelu(m.b(h))) + h,
    "dropout": lambda m, x: m.c(F.dropout(F.gelu(m.b(F.dropout(F.gelu(m.a(x)), 0.5))), 0.5)),
    "several": lambda m, x: m.c(F.gelu(m.a(x)).sort(1)[0]) * F.gelu(m.b(x)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CHAINS)
def test_steps_are_the_plain_ones(name: str) -> None:
    assert_rests_as_plain(Between(CHAINS[name]), [X, X + 1, X, X - 1])


class Cells(nn.Module):
    """Reads items of tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x
        for _ in range(3):
            h, c = self.cell(x, (h, c))
        return h


@pytest.mark.slow
def test_items_of_tuples_rest() -> None:
    assert_rests_as_plain(Cells(), [X, X + 1, X, X])


@pytest.mark.slow
@pytest.mark.parametrize("divide", ["chunk", "split", "unbind"])
def test_an_item_of_a_tuple_that_is_kept_does_not_rest(divide: str) -> None:
    def does(m: Between, x: Tensor) -> Tensor:
        h = F.gelu(m.a(x)).clone()
        first, second = h.unflatten(1, (2, 3)).unbind(1) if divide == "unbind" else getattr(h, divide)(3, dim=1)[:2]
        return m.c(m.b(torch.cat([F.gelu(second), first.sin(), second.cos()], 1)[:, :6]).sin())

    module = Between(does)
    graph = profile(trace(module, X), X, repeats=1)
    kept = [n for n, node in enumerate(graph.nodes) if node.kind == divide]
    ours = recomputing_copy(module, X, kept=kept)
    assert_equal_traces(traces(copy.deepcopy(module), [X, X + 1, X]), traces(ours, [X, X + 1, X]))
    assert kept
    assert rested(ours)


@pytest.mark.slow
def test_images_rest() -> None:
    block = [nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.GELU()]
    module = nn.Sequential(*copy.deepcopy(block), *copy.deepcopy(block), nn.Flatten(), nn.Linear(32, 3))
    x = torch.randn(3, 2, 4, 4)
    assert_rests_as_plain(module, [x, x + 1, x])


@pytest.mark.sampled
@pytest.mark.parametrize(
    "same",
    [
        lambda t: t.contiguous(),
        lambda t: t.float(),
        lambda t: t.to(t.dtype),
        lambda t: t.type_as(t),
        lambda t: F.dropout(t, 0.0),
    ],
)
def test_a_tensor_that_two_operations_return_does_not_rest_when_the_first_is_done(same: Any) -> None:
    def forward(m: Between, x: Tensor) -> Tensor:
        h = F.gelu(m.a(x))
        return m.c(F.gelu(m.b(same(h)))) * h

    assert_rests_as_plain(Between(forward), [X, X + 1, X])


@pytest.mark.slow
def test_a_view_that_was_the_whole_is_a_part_of_another_batch() -> None:
    def forward(m: Between, x: Tensor) -> Tensor:
        h = F.gelu(m.a(x))
        return m.c(F.gelu(m.b(h[: h.shape[0] // 2 * 2])))

    assert_rests_as_plain(Between(forward), [torch.randn(n, 6) for n in (4, 4, 6, 5, 7, 4, 3)])


class Two(nn.Module):
    """Two outputs from a shared trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.gelu(self.trunk(x))
        return self.last(F.gelu(self.left(h))).sigmoid() * h, F.gelu(self.right(h)).exp()


class TwoTaped(Two):
    """The same, on whose ways something is saved for one backward alone; what comes last needs most memory."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.wide, self.narrow = nn.LSTMCell(6, 6), nn.Linear(6, 48), nn.Linear(48, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.layer_norm(F.gelu(self.trunk(x)), (6,))
        a, b = self.cell(F.dropout(h, 0.5))
        left = self.last(F.layer_norm(self.left(F.dropout(a, 0.5)), (6,))).sigmoid() * h
        right = F.dropout(self.right(F.layer_norm(b, (6,))), 0.5)
        return self.narrow(F.gelu(self.wide(left))), self.narrow(F.gelu(self.wide(right))).exp()


class TwoStored(Two):
    """The same, on whose ways operations save what they return; what comes last needs most memory."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 48), nn.Linear(48, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x).tanh()
        left = self.last(self.left(h).sigmoid()).softmax(1) * h
        right = self.right(F.relu(h)).exp().sqrt()
        return self.narrow(self.wide(left).sigmoid()), self.narrow(F.gelu(self.wide(right))).exp()


RESTED: dict[type[nn.Module], Callable[[nn.Module], int]] = {
    Two: rested,
    TwoTaped: rested_tapes,
    TwoStored: rested_results,
}
"""How many of what each kind is about rest."""


Use = Callable[[nn.Module, Tensor], list[Any]]


def assert_used_as_plain(use: Use, module: nn.Module, *, warm_up: Use | None = None, x: Tensor = X) -> nn.Module:
    """Two steps, in the second of which things rest, then the use twice, and a step: all as with the plain module."""
    ours, plain = (resting_copy if type(module) is Two else recomputing_copy)(module, x), copy.deepcopy(module)
    found: list[list[Any]] = []
    for m in (plain, ours):
        torch.manual_seed(3)
        made: list[Any] = []
        for step in (warm_up or ordinary, warm_up or ordinary, use, use, ordinary):
            if step is use and m is ours:
                assert RESTED[type(m)](ours) or len(made) > 2
            made.append([*step(m, x), *(None if p.grad is None else p.grad.clone() for p in m.parameters())])
        found.append([*made, [b.clone() for b in m.buffers()]])
    for a, b in zip(*found, strict=True):
        assert same(a, b)
    return ours


def ordinary(m: nn.Module, x: Tensor) -> list[Any]:
    m.zero_grad()
    loss_of(m(x)).backward()
    return []


def left(m: nn.Module, x: Tensor) -> list[Any]:
    m(x)[0].square().sum().backward()
    return []


def right(m: nn.Module, x: Tensor) -> list[Any]:
    m(x)[1].square().sum().backward()
    return []


def right_then_left(m: nn.Module, x: Tensor) -> list[Any]:
    a, b = m(x)
    b.sum().backward(retain_graph=True)
    a.square().sum().backward()
    return []


def left_then_right(m: nn.Module, x: Tensor) -> list[Any]:
    a, b = m(x)
    a.sum().backward(retain_graph=True)
    b.square().sum().backward()
    return []


def parts_that_share_nothing(m: nn.Module, x: Tensor) -> list[Any]:
    """The second needs no graph that the first has let go of."""
    a, b = m(x)
    found = [*torch.autograd.grad(a.sum(), list(m.left.parameters()))]
    return [*found, *torch.autograd.grad(b.sum(), list(m.right.parameters()))]


def twice(m: nn.Module, x: Tensor) -> list[Any]:
    loss = loss_of(m(x))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    return [loss.detach()]


def of_inputs(m: nn.Module, x: Tensor) -> list[Any]:
    x = x.clone().requires_grad_()
    return [*torch.autograd.grad(loss_of(m(x)), [x])]


def of_some(m: nn.Module, x: Tensor) -> list[Any]:
    return [*torch.autograd.grad(loss_of(m(x)), [m.trunk.weight, m.last.bias], allow_unused=True)]


def of_the_last(m: nn.Module, x: Tensor) -> list[Any]:
    return [*torch.autograd.grad(loss_of(m(x)), [m.last.weight])]


def penalty(m: nn.Module, x: Tensor) -> list[Any]:
    outputs = m(x)
    (gradient,) = torch.autograd.grad(loss_of(outputs), m.trunk.weight, create_graph=True)
    (gradient.square().sum() + loss_of(outputs)).backward()
    return [gradient.detach()]


def penalty_of_the_last(m: nn.Module, x: Tensor) -> list[Any]:
    """What is differentiated twice begins in the middle."""
    (gradient,) = torch.autograd.grad(m(x)[0].sum(), m.last.weight, create_graph=True)
    gradient.square().sum().backward()
    return [gradient.detach()]


def forwards_first(m: nn.Module, x: Tensor) -> list[Any]:
    (loss_of(m(x)) + 2 * loss_of(m(x + 1))).backward()
    return []


def forward_alone(m: nn.Module, x: Tensor) -> list[Any]:
    dropped = m(x)
    del dropped
    return [t.detach() for t in m(x)]


def frozen(m: nn.Module, x: Tensor) -> list[Any]:
    m.trunk.requires_grad_(False)
    ordinary(m, x)
    m.left.requires_grad_(False)
    ordinary(m, x)
    ordinary(m, x)
    m.requires_grad_(True)
    ordinary(m, x)
    return []


def in_another_thread(m: nn.Module, x: Tensor) -> list[Any]:
    loss = loss_of(m(x))
    with ThreadPoolExecutor(1) as other:
        other.submit(loss.backward).result()
    return []


def in_eval_and_back(m: nn.Module, x: Tensor) -> list[Any]:
    found = [t.detach() for t in m.eval()(x)]
    ordinary(m.train(), x)
    return found


def smaller_batches(m: nn.Module, x: Tensor) -> list[Any]:
    for n in (3, 2, 4, 1):
        ordinary(m, x[:n])
    return []


def in_lower_precision(m: nn.Module, x: Tensor) -> list[Any]:
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(m(x))
        loss.backward()
    return [loss.detach()]


def saved_elsewhere(m: nn.Module, x: Tensor) -> list[Any]:
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(m(x))
    loss.backward()
    return []


def outputs_written(m: nn.Module, x: Tensor) -> list[Any]:
    a, b = m(x)
    a *= 2
    (a.sum() + b.sum()).backward()
    return []


@pytest.mark.sampled
@pytest.mark.parametrize(
    "use",
    [
        left_then_right,
        left,
        right,
        right_then_left,
        parts_that_share_nothing,
        twice,
        of_inputs,
        of_some,
        of_the_last,
        penalty,
        penalty_of_the_last,
        forwards_first,
        forward_alone,
        frozen,
        in_another_thread,
        in_eval_and_back,
        smaller_batches,
        in_lower_precision,
        saved_elsewhere,
        outputs_written,
    ],
)
@pytest.mark.parametrize("kind", RESTED)
def test_uses_while_things_rest_are_those_of_the_plain_module(use: Use, kind: type[nn.Module]) -> None:
    assert_used_as_plain(use, kind())


@pytest.mark.slow
@pytest.mark.parametrize("warm_up", [left, right, of_some, saved_elsewhere, in_lower_precision])
def test_what_a_first_step_learns_holds_for_others(warm_up: Use) -> None:
    for use in (ordinary, left_then_right):
        for kind in RESTED:
            assert_used_as_plain(use, kind(), warm_up=warm_up)
