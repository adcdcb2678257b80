"""Two processes on the CPU, started by test_distributed.py: a plain and a rewritten run, compared bit by bit."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from exchanging_modules import EXCHANGES, search_within_ddp, train_as_without, try_in_threads
from forked_ranks import run_ranks
from rewriting import rewrite
from sharded_nets import counted
from synchronized_kernels import HostSyncBatchNorm
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from lightning_remat import rematerialize
from lightning_remat.module_state.ambient import Recomputing


class Skips(nn.Module):
    """Layers of which the second half is left out every other step; the rank decides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh()) for _ in range(4))
        )
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return self.left(y).sigmoid(), self.right(y).sigmoid()


def steps(module: nn.Module, accumulate: int, *, all_outputs: bool) -> list[Tensor]:
    """Gradients and buffers of three steps of SGD under DDP."""
    torch.manual_seed(100 + dist.get_rank())
    batches = [torch.randn(6, 8) for _ in range(3 * accumulate)]
    ddp = DistributedDataParallel(module, find_unused_parameters=not all_outputs, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    found: list[Tensor] = []
    for k, batch in enumerate(batches):
        last = (k + 1) % accumulate == 0
        with contextlib.nullcontext() if last else ddp.no_sync():
            outputs = ddp(batch)
            loss = sum(o.square().sum() for o in outputs) if all_outputs else outputs[k % 2].square().sum()
            loss.backward()
        if last:
            found += [p.grad.clone() for p in module.parameters() if p.grad is not None]
            found += [b.clone() for b in module.buffers()]
            optimizer.step()
            optimizer.zero_grad()
    return [*found, torch.get_rng_state()]


def compare(*, accumulate: int, all_outputs: bool) -> None:
    torch.manual_seed(1)
    plain = Skips()
    ours = copy.deepcopy(plain)
    rewrite(ours, (), torch.randn(6, 8))
    expected = steps(plain, accumulate, all_outputs=all_outputs)
    with counted(Recomputing, "__enter__") as runs:
        found = steps(ours, accumulate, all_outputs=all_outputs)
    assert len(runs) >= 3 * accumulate, len(runs)  # each step recomputes something
    assert len(expected) == len(found)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def sync_batch_norm() -> None:
    """On the CPU the plain module refuses to run in a group; so does the rewritten one, with the same words."""
    module = nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8), nn.Sigmoid())
    messages = []
    for rewritten in (False, True):
        try:
            if rewritten:
                rewrite(module, (), torch.randn(6, 8))
            module(torch.randn(6, 8)).sum().backward()
            messages.append("ran")
        except ValueError as error:
            messages.append(str(error))
    assert "SyncBatchNorm expected input tensor to be on GPU" in messages[0], messages
    assert messages[0] in messages[1], messages


class Synchronized(nn.Module):
    """Blocks whose norms exchange statistics; one of them is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), HostSyncBatchNorm(4), nn.ReLU()) for _ in range(6))
        )
        self.blocks[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def synchronized() -> None:
    """Processes with batches of different sizes, which plan alone, and exchange no more than in plain steps."""
    torch.manual_seed(1)
    plain = Synchronized()
    ours = copy.deepcopy(plain)
    torch.manual_seed(2 + dist.get_rank())
    batches = [torch.randn(6 + 2 * dist.get_rank(), 4, 12, 12, requires_grad=True) for _ in range(4)]
    with counted(dist, "all_gather") as exchanged, counted(dist, "all_reduce") as summed:
        made = rematerialize(ours, batches[0], memory_budget="60%", self_check=True)
    assert not exchanged
    assert not summed
    assert made.num_recomputed
    assert made.peak_bytes <= made.budget_bytes
    assert abs(made.correction_bytes) < 0.01 * made.peak_bytes
    with FakeTensorMode():
        fake = rematerialize(Synchronized(), torch.empty(batches[0].shape, requires_grad=True), memory_budget="60%")
    assert [n.output_bytes + n.tape_bytes for n in fake.graph.nodes] == [
        n.output_bytes + n.tape_bytes for n in made.graph.nodes
    ]
    outcomes: list[list[Tensor]] = []
    for module in (plain, ours):
        found: list[Tensor] = []
        with counted(dist, "all_gather") as exchanged, counted(dist, "all_reduce") as summed:
            for batch in batches:
                found += torch.autograd.grad(module(batch).square().mean(), [batch, *trained(module)])
                found += [b.clone() for b in module.buffers()]
        assert (len(exchanged), len(summed)) == (6 * len(batches), 6 * len(batches))
        outcomes.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def trained(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.requires_grad]


def sharded_later() -> None:
    """A module that is rewritten first: its parameters lie gathered when it recomputes."""
    from torch.distributed.fsdp import fully_shard

    for reshards in (False, True):
        torch.manual_seed(1)
        plain = Skips()
        later = copy.deepcopy(plain)
        rewrite(later, (), torch.randn(6, 8))
        outcomes: list[list[Tensor]] = []
        for module in (plain, later):
            fully_shard(module, reshard_after_forward=reshards)
            torch.manual_seed(2)
            sum(o.square().sum() for o in module(torch.randn(6, 8))).backward()
            outcomes.append([p.grad.to_local() for p in module.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True)), reshards


def ddp_itself_is_refused() -> None:
    with pytest.raises(ValueError, match=r"DistributedDataParallel.*Remedy"):
        rematerialize(DistributedDataParallel(Skips()), torch.randn(6, 8), memory_budget="90%")


RUNS: dict[str, Callable[[], None]] = {
    "plain": lambda: compare(accumulate=1, all_outputs=True),
    "no_sync": lambda: compare(accumulate=3, all_outputs=True),
    "unused": lambda: compare(accumulate=1, all_outputs=False),
    "sync_batch_norm": sync_batch_norm,
    "synchronized": synchronized,
    "sharded_later": sharded_later,
    "ddp": ddp_itself_is_refused,
    "search (DDP)": search_within_ddp,
    "threads": try_in_threads,
    **{f"exchange ({name})": partial(train_as_without, exchange) for name, exchange in EXCHANGES.items()},
}


def main() -> None:
    dist.init_process_group("gloo")
    for name, run in RUNS.items():
        run()
        print(f"{name} ok\n", end="", flush=True)  # in one piece, as both write to the same
    dist.destroy_process_group()


if __name__ == "__main__":
    run_ranks(2, main)
