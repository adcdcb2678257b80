"""Modules whose forward or backward exchanges data with the other processes of a group."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_remat import find_batch_size, rematerialize
from lightning_remat.module_state.own_exchanges import exchanging_alone

WIDTH = 32


class Gathered(torch.autograd.Function):
    """What all processes have, as losses that contrast samples need it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(found, x.contiguous())
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def summed(x: Tensor) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x)
    return x


class SumsGradients(torch.autograd.Function):
    """Exchanges in its backward alone, as what enters layers that are spread over processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return summed(gradient)


def gathered_in_lists(x: Tensor) -> Tensor:
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.detach())
    return x * sum(found)


def hooked(x: Tensor) -> Tensor:
    x = x.sin()
    x.register_hook(summed)
    return x


def waited_for(x: Tensor) -> Tensor:
    mean = x.detach().mean(0)
    work = dist.all_reduce(mean, async_op=True)
    x = x.sin()
    work.wait()
    return x - mean


def objects(x: Tensor) -> Tensor:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, dist.get_rank() + 1.5)
    return x * sum(found)


def neighbours(x: Tensor) -> Tensor:
    other, found = 1 - dist.get_rank(), torch.empty_like(x)
    work = dist.irecv(found, other)
    dist.send(x.detach(), other)
    work.wait()
    return x + found


EXCHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x - summed(x.mean(0)),
    "lists": gathered_in_lists,
    "function": lambda x: Gathered.apply(x).exp()[: len(x)],
    "gradients": lambda x: SumsGradients.apply(x).sin(),
    "hook": hooked,
    "asynchronous": waited_for,
    "objects": objects,
    "neighbours": neighbours,
    "differentiable sum": lambda x: x - differentiable.all_reduce(x.mean(0)),
    "differentiable lists": lambda x: torch.cat(differentiable.all_gather(x)).exp()[: len(x)],
    "functional": lambda x: x - functional.all_reduce(x.detach().mean(0), "sum", dist.group.WORLD),
}


class Exchanging(nn.Module):
    """Blocks, and an exchange between the first two."""

    def __init__(self, exchange: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.exchange = exchange
        self.blocks = nn.ModuleList(
            nn.Sequential(*(f() for _ in range(3) for f in (lambda: nn.Linear(WIDTH, WIDTH), nn.Sigmoid)))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.exchange(self.blocks[0](x))
        return self.blocks[2](self.blocks[1](h).tanh() * 2).tanh()


def train_as_without(exchange: Callable[[Tensor], Tensor]) -> None:
    """One process plans, by steps of which the others know nothing; all train as without a plan."""
    torch.manual_seed(1)
    plain = Exchanging(exchange)
    planned, searched = copy.deepcopy(plain), copy.deepcopy(plain)
    torch.manual_seed(2 + dist.get_rank())
    batches = [torch.randn(64, WIDTH) for _ in range(3)]
    if dist.get_rank() == 0:
        assert rematerialize(planned, batches[0], memory_budget="85%", self_check=True).num_recomputed
    else:
        found = find_batch_size(
            searched, batches[0], lambda x: searched(x).square().mean(), torch.optim.SGD(searched.parameters(), 0.1),
            memory_budget="90%", batch_size="keep",
        )  # fmt: skip
        assert found.step.num_recomputed
    assert_same_gradients(batches, plain, planned, searched)


def search_within_ddp() -> None:
    """All processes search, and may try other numbers of steps: what DDP sums stays here meanwhile."""
    torch.manual_seed(1)
    plain = Exchanging(torch.sin)
    ours = copy.deepcopy(plain)
    torch.manual_seed(2 + dist.get_rank())
    batches = [torch.randn(64, WIDTH) for _ in range(3)]
    inside, outside = DistributedDataParallel(ours), DistributedDataParallel(plain)
    found = find_batch_size(
        ours, batches[0], lambda x: inside(x).square().mean(), torch.optim.SGD(ours.parameters(), 0.1),
        memory_budget="80%" if dist.get_rank() else "90%", batch_size="keep",
    )  # fmt: skip
    assert found.step.num_recomputed
    for batch in batches:
        outcomes = []
        for ddp in (inside, outside):
            ddp.zero_grad()
            ddp(batch).square().mean().backward()
            outcomes.append([p.grad for p in ddp.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def try_in_threads() -> None:
    """Two threads of one process try at once, one within another try: each exchanges by itself."""
    module, both, found = nn.Linear(1, 1), threading.Barrier(2), list[float]()

    def tries() -> None:
        with exchanging_alone(module):
            both.wait()
            found.append(functional.all_reduce(torch.ones(()), "sum", dist.group.WORLD).item())
            both.wait()
            with exchanging_alone(module):
                found.append(functional.all_reduce(torch.ones(()), "sum", dist.group.WORLD).item())
            both.wait()

    if dist.get_rank() == 0:
        threads = [threading.Thread(target=tries) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [1.0] * 4


def assert_same_gradients(batches: list[Tensor], *modules: nn.Module) -> None:
    expected, *others = [
        [torch.autograd.grad(m(x).square().mean(), [*m.parameters()]) for x in batches] for m in modules
    ]
    for gradients in others:
        assert all(torch.equal(a, b) for a, b in zip(sum(gradients, ()), sum(expected, ()), strict=True))
