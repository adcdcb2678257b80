"""Sharded runs on the CPU, started by test_sharded.py: plain FSDP2 and ours, compared bit by bit."""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from sharded_fits import FITS, one_fails, one_runs_out
from sharded_nets import FEATURES, HALF, SAMPLES, Transformer, assert_same, counted, shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torchvision.models import resnet18

from lightning_remat import find_batch_size, rematerialize
from lightning_remat.execution.executor import Execution
from lightning_remat.module_state.ambient import Recomputing
from lightning_remat.regions.step_run import step_peak


def steps(module: nn.Module, accumulate: int = 1) -> list[Tensor]:
    """Gradients, losses, weights of three steps, and how often anything was gathered."""
    torch.manual_seed(7 + dist.get_rank())
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    found: list[Tensor] = []
    with counted(_fsdp_param_group, "foreach_all_gather") as gathers:
        for k in range(3 * accumulate):
            last = (k + 1) % accumulate == 0
            module.set_requires_gradient_sync(last)
            loss = module(torch.randn(SAMPLES, FEATURES)).float().square().mean()
            loss.backward()
            found.append(loss.detach())
            if last:
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                found += [p.grad.to_local().clone() for p in module.parameters()]
                optimizer.step()
                optimizer.zero_grad()
    return [*found, *weights(module), torch.tensor(len(gathers)), torch.get_rng_state()]


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().to_local().clone() for p in module.parameters()]


def compare(
    net: Callable[[], nn.Module] = Transformer, *, budget: str = "90%", accumulate: int = 1, **options: Any
) -> None:
    """Three steps of plain FSDP2 and of ours; each recomputes something."""
    torch.manual_seed(0)
    plain = net()
    ours = copy.deepcopy(plain)
    for module in (plain, ours):
        shard(module, **options)
    before = weights(ours)
    torch.manual_seed(5)
    made = rematerialize(ours, torch.randn(SAMPLES, FEATURES), memory_budget=budget, planner="periodic")
    assert made.num_recomputed, made.reasons
    assert_same(before, weights(ours))
    assert all(p.grad is None for p in ours.parameters())
    expected = steps(plain, accumulate)
    with counted(Recomputing, "__enter__") as runs, counted(Execution, "_run") as stretches:
        found = steps(ours, accumulate)
    assert len(runs) + len(stretches) >= 3 * accumulate, (len(runs), len(stretches))
    assert_same(expected, found)


def leaf_unit() -> None:
    """A module that is one unit by itself."""
    compare(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Sigmoid()) for _ in range(6))))


def gathers_as_planned() -> None:
    """Units that stay gathered by the plan: fewer gathers than FSDP2's default, and its bits."""
    torch.manual_seed(0)
    plain = Transformer()
    ours = copy.deepcopy(plain)
    x = torch.randn(SAMPLES, FEATURES)
    made = rematerialize(shard(ours), x, memory_budget="95%", planner="periodic", gather_bandwidth="measure")
    assert made.num_recomputed
    *expected, plain_gathers, state = steps(shard(plain))
    *found, gathers, same_state = steps(ours)
    assert_same([*expected, state], [*found, same_state])
    assert gathers < plain_gathers, (gathers, plain_gathers)


def plain_loop() -> None:
    """`find_batch_size`: one size for both processes, executed."""
    torch.manual_seed(0)
    module, x = shard(Transformer()), torch.randn(64, FEATURES)
    optimizer = torch.optim.AdamW(module.parameters())
    found = find_batch_size(
        module,
        x,
        lambda batch: module(batch).square().mean(),
        optimizer,
        "periodic",
        memory_budget="3MiB" if dist.get_rank() else "2MiB",
        max_batch_size=1024,
    )
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, (found.batch_size, str(found.step.plans)))
    assert sizes[0] == sizes[1]
    assert found.batch_size > 64
    assert found.step.num_recomputed
    assert found.measured_peak_bytes is not None
    assert found.measured_peak_bytes <= 2 * 2**20


def earlier_plan() -> None:
    """A plan that was made before is installed; one step is compared with the plain one."""
    torch.manual_seed(0)
    module = shard(Transformer())
    x = torch.randn(SAMPLES, FEATURES)
    made = rematerialize(module, x, memory_budget="90%", planner="periodic", self_check=True)
    again = rematerialize(module, x, plan=made)
    assert again.schedule == made.schedule
    assert again.num_recomputed


def tensor_parallel_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    for both in (False, True):
        module = Transformer()
        parallelize_module(module, mesh["tensor_parallel"], {"head": ColwiseParallel()})
        if both:
            fully_shard(module, mesh=mesh["data_parallel"])
        with pytest.raises(ValueError, match=r"tensor parallel.*Remedy"):
            rematerialize(module, torch.randn(SAMPLES, FEATURES), memory_budget="90%")


def predicts() -> None:
    """What is predicted without any measured step is within a fiftieth of what plain and planned steps need."""
    for net, x, options in (
        (Transformer, torch.randn(SAMPLES, FEATURES), {}),
        (Transformer, torch.randn(16, FEATURES), {"reshard_after_forward": False}),
        (Transformer, torch.randn(SAMPLES, FEATURES), {"mp_policy": HALF}),
        (resnet18, torch.randn(16, 3, 64, 64), {}),
    ):
        torch.manual_seed(0)
        module = shard(net(), **options)
        step_peak(module, (x,), {})  # the first step makes what the others find
        plain_bytes = step_peak(module, (x,), {})
        made = rematerialize(module, x, memory_budget="96%", planner="periodic")
        assert made.step is not None
        assert made.num_recomputed
        planned_bytes = step_peak(module, (x,), {})
        assert made.plain.peak_bytes == pytest.approx(plain_bytes, rel=0.02), (net, made.plain.peak_bytes, plain_bytes)
        assert made.peak_bytes == pytest.approx(planned_bytes, rel=0.02), (net, made.peak_bytes, planned_bytes)
        assert abs(made.step.surroundings.correction_bytes) < 0.02 * made.peak_bytes, made.step.surroundings


RUNS: dict[str, Callable[[], None]] = {
    "reshards": lambda: compare(reshard_after_forward=True),
    "stays": lambda: compare(reshard_after_forward=False),
    "reshards_in_part": lambda: compare(reshard_after_forward=1),
    "mixed": lambda: compare(mp_policy=HALF),
    "accumulates": lambda: compare(accumulate=2),
    "nested": lambda: compare(lambda: Transformer(stages=2)),
    "graph_breaks": lambda: compare(lambda: Transformer(breaks=True), budget="95%"),
    "leaf_unit": leaf_unit,
    "earlier_plan": earlier_plan,
    "predicts": predicts,
    "gathers_as_planned": gathers_as_planned,
    "plain_loop": plain_loop,
    "tensor_parallel": tensor_parallel_is_refused,
}


def four(folder: Path) -> None:
    """One of four processes."""
    dist.init_process_group("gloo")
    compare()
    compare(reshard_after_forward=2)
    gathers_as_planned()
    predicts()
    (folder / f"done-{dist.get_rank()}").write_text("all")
    dist.destroy_process_group()


def two(folder: Path) -> None:
    """One of two processes, which run one thing after another."""
    fits = {name: partial(fit, folder) for name, fit in FITS.items()}
    done: list[str] = []
    for name, run in (fits | RUNS).items():  # the first begins the group of processes
        run()
        done.append(name)
        (folder / f"done-{dist.get_rank()}").write_text("\n".join(done))
    dist.destroy_process_group()


GROUPS: dict[str, tuple[int, Callable[[Path], None]]] = {
    "two": (2, two),
    "four": (4, four),
    "fails": (2, one_fails),
    "runs_out": (2, one_runs_out),
}
"""How many processes, and what each does."""


def main(folder: Path, what: str) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    num_ranks, run = GROUPS[what]
    run_ranks(num_ranks, partial(run, folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
