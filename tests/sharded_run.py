"""One rank of sharded runs on the CPU, started by test_sharded.py: plain FSDP2 and ours, compared bit by bit."""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from sharded_nets import Transformer, counted, shard
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

import lightning_remat.batch_search.search as search
from lightning_remat import Rematerialization, find_batch_size, rematerialize
from lightning_remat.measure.device_memory import DeviceMemory
from lightning_remat.module_state import agreement
from lightning_remat.module_state.ambient import Recomputing
from lightning_remat.regions.step_run import step_peak

WIDTH, SAMPLES = 8, 256

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Sharded(LightningModule):
    """Sharded where Lightning wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.batch_size = Transformer(), SAMPLES

    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), 1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        samples = torch.randn(16 * SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(samples), batch_size=self.batch_size)


def fit(
    folder: Path,
    save: str,
    callback: Rematerialization | None,
    kind: type[Sharded] = Sharded,
    *,
    batch_size: int = SAMPLES,
    **options: Any,
) -> list[Tensor]:
    """The weights and the random state after training."""
    module, resumed = kind(), options.pop("ckpt_path", None)
    module.batch_size = batch_size
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        callbacks=[] if callback is None else [callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        max_epochs=4,
        **options,
    )
    torch.manual_seed(11 + trainer.global_rank)
    trainer.fit(module, ckpt_path=resumed)
    assert trainer.global_step == options["max_steps"], trainer.global_step
    trainer.save_checkpoint(folder / save)
    return [*(p.detach().to_local().clone() for p in module.parameters()), torch.get_rng_state()]


def in_trainer(folder: Path) -> None:
    """Accumulation, clipping and dropout in Lightning; the checkpoint of either run is resumed, and the same."""
    for k, resumed in enumerate((False, True)):
        outcomes: list[list[Tensor]] = []
        for name in ("plain", "planned"):
            callback = (
                None if name == "plain" else Rematerialization("periodic", memory_budget="85%", batch_size="keep")
            )
            paths = {"ckpt_path": folder / f"{name}-0"} if resumed else {}
            outcomes.append(fit(folder, f"{name}-{k}", callback, max_steps=3 * (k + 1), **paths))
            if callback is not None:
                assert callback.result is not None
                step = callback.result.step
                assert step.num_recomputed, "nothing is recomputed"
                assert abs(step.surroundings.correction_bytes) < 0.02 * step.predicted_peak_bytes, step.surroundings
        assert_same(*outcomes)
        if dist.get_rank() == 0:
            assert_same(*(consolidated(folder / f"{name}-{k}") for name in ("plain", "planned")))


def consolidated(checkpoint: Path) -> list[Tensor]:
    """The weights of a checkpoint that all ranks have written, in one piece."""
    whole = checkpoint.with_suffix(".pt")
    dcp_to_torch_save(checkpoint, whole)
    state: dict[str, Tensor] = torch.load(whole)["state_dict"]
    assert state["net.head.weight"].shape == Transformer().head.weight.shape
    return list(state.values())


def steps(module: nn.Module, accumulate: int = 1) -> list[Tensor]:
    """Gradients, losses, weights of three steps, and how often anything was gathered."""
    torch.manual_seed(7 + dist.get_rank())
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    found: list[Tensor] = []
    with counted(_fsdp_param_group, "foreach_all_gather") as gathers:
        for k in range(3 * accumulate):
            last = (k + 1) % accumulate == 0
            module.set_requires_gradient_sync(last)
            loss = module(torch.randn(SAMPLES, WIDTH)).float().square().mean()
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
    made = rematerialize(ours, torch.randn(SAMPLES, WIDTH), memory_budget=budget, planner="periodic")
    assert made.num_recomputed, made.reasons
    assert_same(before, weights(ours))
    assert all(p.grad is None for p in ours.parameters())
    expected = steps(plain, accumulate)
    with counted(Recomputing, "__enter__") as runs:
        found = steps(ours, accumulate)
    assert len(runs) >= 3 * accumulate, len(runs)
    assert_same(expected, found)


def assert_same(expected: list[Tensor], found: list[Tensor]) -> None:
    unlike = [k for k, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.equal(a, b)]
    assert not unlike, f"{unlike} of {len(found)} differ"


def leaf_unit() -> None:
    """A module that is one unit by itself."""
    compare(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()) for _ in range(6))))


def gathers_as_planned() -> None:
    """Units that stay gathered by the plan: fewer gathers than FSDP2's default, and its bits."""
    torch.manual_seed(0)
    plain = Transformer()
    ours = copy.deepcopy(plain)
    x = torch.randn(SAMPLES, WIDTH)
    made = rematerialize(shard(ours), x, memory_budget="95%", planner="periodic", gather_bandwidth="measure")
    assert made.num_recomputed
    *expected, plain_gathers, state = steps(shard(plain))
    *found, gathers, same_state = steps(ours)
    assert_same([*expected, state], [*found, same_state])
    assert gathers < plain_gathers, (gathers, plain_gathers)


def plain_loop() -> None:
    """`find_batch_size`: one size for both processes, executed."""
    torch.manual_seed(0)
    module, x = shard(Transformer()), torch.randn(64, WIDTH)
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
    x = torch.randn(SAMPLES, WIDTH)
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
            rematerialize(module, torch.randn(SAMPLES, WIDTH), memory_budget="90%")


def predicts() -> None:
    """What is predicted without any measured step is within a fiftieth of what plain and planned steps need."""
    for net, x, options in (
        (Transformer, torch.randn(SAMPLES, WIDTH), {}),
        (Transformer, torch.randn(16, WIDTH), {"reshard_after_forward": False}),
        (Transformer, torch.randn(SAMPLES, WIDTH), {"mp_policy": HALF}),
        (resnet18, torch.randn(16, 3, 64, 64), {}),
    ):
        torch.manual_seed(0)
        module = shard(net(), **options)
        step_peak(module, (x,), {})  # the first step makes what the others find
        plain_bytes = step_peak(module, (x,), {})
        made = rematerialize(module, x, memory_budget="96%", planner="periodic")
        assert made.step is not None
        assert made.num_recomputed
        assert made.plain.peak_bytes == pytest.approx(plain_bytes, rel=0.02)
        assert made.peak_bytes == pytest.approx(step_peak(module, (x,), {}), rel=0.02)
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


class Fails(Sharded):
    """The first step that recomputes, which is tried before training, fails on the second process alone."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == 1 and "_rematerialization" in vars(self.net.stages[0][0]):
            raise ArithmeticError("of the second process")
        return super().training_step(batch, batch_idx)


def finds_a_size(folder: Path) -> None:
    """The processes have different memory; one size for both, and the bits of plain FSDP2 at it."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "device_memory", lambda device: DeviceMemory((8, 4)[dist.get_rank()] * 2**20, 2**30))
        callback = Rematerialization("periodic", margin=0.0, multiple_of=16, max_batch_size=1024)
        found.append(fit(folder, "auto", callback, batch_size=64, max_steps=2))
    assert callback.result is not None
    size, step = callback.result.batch_size, callback.result.step
    sizes: list[Any] = [None, None]
    dist.all_gather_object(sizes, (size, str(step.plans)))
    assert sizes[0] == sizes[1]
    assert size > 64
    assert step.num_recomputed
    assert callback.result.measured_peak_bytes <= 4 * 2**20
    found.append(fit(folder, "auto-plain", None, batch_size=size, max_steps=2))
    assert_same(*found)


def one_fails(folder: Path) -> None:
    """Each process writes with what error it ends."""
    agreement.PATIENCE = timedelta(seconds=5)
    try:
        fit(folder, "fails", Rematerialization("periodic", memory_budget="85%", batch_size="keep"), Fails, max_steps=2)
    except BaseException as error:
        (folder / f"failed-{dist.get_rank()}").write_text(f"{type(error).__name__}: {error}")
        raise


def four(folder: Path, rank: int) -> None:
    """Four processes, started by the test."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=4)
    compare()
    compare(reshard_after_forward=2)
    gathers_as_planned()
    predicts()
    (folder / f"done-{rank}").write_text("all")
    dist.destroy_process_group()


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if sys.argv[2:3] == ["four"]:
        four(folder, int(sys.argv[3]))
        return
    if sys.argv[2:] == ["fails"]:
        one_fails(folder)
    in_trainer(folder)  # begins the group of processes
    finds_a_size(folder)
    done = ["in_trainer", "finds_a_size"]
    for name, run in RUNS.items():
        run()
        done.append(name)
        (folder / f"done-{dist.get_rank()}").write_text("\n".join(done))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
