"""A rank's peak over world size and budget, of a GPT of some billion parameters under `fully_shard`, in one process.

The group of processes is PyTorch's fake one and the tensors are fake: nothing is allocated or sent. Bytes are those of
tensors, AdamW's states included; seconds are estimates from the data sheet of a device and a bandwidth. Writes
recipes/results/world_sizes.md and .png.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_remat import InfeasibleBudgetError
from lightning_remat.batch_search.plain_trial import PlainTrial
from lightning_remat.batch_search.trial import StepModel, install, model_step, uninstall
from lightning_remat.command_line.devices import device_named
from lightning_remat.command_line.sharding import imagined_world, shard_blocks
from lightning_remat.measure.cost_model import assumed_speed
from lightning_remat.plans.plan import StepPlan

sys.path.insert(0, str(Path(__file__).parent.parent))
from remat_recipes.networks.gpt import GPT

RESULTS = Path(__file__).parent.parent / "results"
GIB = 2**30
NUM_BUDGETS = 6
PRECISION = "bf16-mixed"


@dataclass(frozen=True)
class World:
    """What was planned for a rank of a world.

    Attributes:
        size: Number of ranks.
        num_parameters: Of the whole model.
        plain_bytes: The peak as FSDP2 runs it, every block resharded after its forward.
        plans: From the lowest budget to that peak.
        measured_bytes: The peak of the plan in the middle, run on fake tensors.
        seconds: What all of it took.
        processor_seconds: Those of it in which this process had a processor.
    """

    size: int
    num_parameters: int
    plain_bytes: int
    plans: tuple[StepPlan, ...]
    measured_bytes: int
    seconds: float
    processor_seconds: float

    @property
    def middle(self) -> StepPlan:
        """The plan that was run."""
        return self.plans[len(self.plans) // 2]


def plan_world(size: int, arguments: argparse.Namespace) -> World:
    """Plans a rank of a world at budgets from the lowest peak to the plain one."""
    start, start_on_processor = time.perf_counter(), time.process_time()
    mode, device = FakeTensorMode(), device_named(arguments.device)
    with imagined_world(size) as mesh, mode, assumed_speed(device.speed_at(PRECISION)):
        heads = arguments.width // 128
        module = GPT(
            width=arguments.width, num_blocks=arguments.blocks, num_heads=heads, num_positions=arguments.length
        )
        num_parameters = sum(p.numel() for p in module.parameters())
        shard_blocks(module, mesh)
        tokens = torch.zeros(arguments.batch_size, arguments.length, dtype=torch.int64)
        trial = PlainTrial(
            module,
            tokens,
            lambda batch: module(batch).float().square().mean(),
            [torch.optim.AdamW(module.parameters(), fused=True)],
            partial(torch.autocast, "cpu", dtype=torch.bfloat16),
            torch.autograd.backward,
            None,
            is_accumulating=False,
            gather_bandwidth=arguments.gigabytes * 1e9,
        )
        model = model_step(trial, (arguments.batch_size,), with_scratch=False)
        predicted = model.plain_timeline(arguments.batch_size).peak_bytes
        plain_bytes = trial.measure(arguments.batch_size, with_scratch=False)
        model = model.corrected(plain_bytes - predicted, arguments.batch_size)  # by what the loss needs
        lowest = _planned(model, arguments, 1)
        least = lowest.predicted_peak_bytes
        budgets = [least + (plain_bytes - least) * k // (NUM_BUDGETS - 1) for k in range(1, NUM_BUDGETS)]
        plans = (lowest, *(_planned(model, arguments, budget) for budget in budgets))
        modules = install(trial, arguments.batch_size, plans[len(plans) // 2], arguments.planner)
        measured = trial.measure(arguments.batch_size, with_scratch=False)
        uninstall(modules)
    seconds, processor_seconds = time.perf_counter() - start, time.process_time() - start_on_processor
    return World(size, num_parameters, plain_bytes, plans, measured, seconds, processor_seconds)


def _planned(model: StepModel, arguments: argparse.Namespace, budget_bytes: int) -> StepPlan:
    try:
        return model.plan(arguments.batch_size, budget_bytes, arguments.planner)
    except InfeasibleBudgetError as error:
        return model.plan(arguments.batch_size, error.sufficient_bytes, arguments.planner)


def gathered_again(step: StepPlan) -> int:
    """Units that are gathered again for their backward."""
    gathering = step.surroundings.gathering
    assert gathering is not None
    return gathering.second_gathers


def more_time(step: StepPlan) -> float:
    """Seconds beyond the step that recomputes nothing and gathers once, as a fraction of it."""
    fastest = sum(step.plans[key].plain.seconds for key in step.keys)
    return step.seconds / fastest - 1


HEADER = """| ranks | plain peak (GiB) | planned peak (GiB) | operations run again | units gathered again | more time |
|---|---|---|---|---|---|
"""


def rows_of(world: World) -> list[str]:
    """The rows of one world, the lowest peak first."""
    return [
        f"| {world.size} | {world.plain_bytes / GIB:.2f} | {step.predicted_peak_bytes / GIB:.2f} | "
        f"{step.num_recomputed} | {gathered_again(step)} | +{more_time(step):.1%} |"
        for step in world.plans
    ]


def checked(world: World) -> str:
    """What was predicted beside what was measured, and how long it took."""
    predicted = world.middle.predicted_peak_bytes
    return (
        f"{world.size} ranks: the plan for {predicted / GIB:.2f} GiB, run on fake tensors, peaks at "
        f"{world.measured_bytes / GIB:.2f} GiB ({world.measured_bytes / predicted - 1:+.2%}); all of it took "
        f"{world.seconds:.0f} s, {world.processor_seconds:.0f} s of a processor."
    )


def draw(worlds: Sequence[World], file: Path, title: str) -> None:
    """More time over the peak of a rank, a curve for each world."""
    figure = Figure(figsize=(7, 4), layout="constrained", dpi=110)
    axes = figure.add_subplot()
    for number, world in enumerate(worlds):
        peaks = [step.predicted_peak_bytes / GIB for step in world.plans]
        axes.plot(
            peaks, [100 * more_time(s) for s in world.plans], "o-", color=f"C{number}", label=f"{world.size} ranks"
        )
        axes.axvline(world.plain_bytes / GIB, color=f"C{number}", linestyle=":")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("peak of a rank [GiB]; dotted: as FSDP2 runs it")
    axes.set_ylabel("more time, gathers included [%]")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(file)


def main() -> None:
    """Prints the table, and writes it with its figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worlds", nargs="*", type=int, default=[8, 16, 64])
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default="H100")
    parser.add_argument("--gigabytes", type=float, default=50.0, help="a second, that a rank receives in a gather")
    parser.add_argument("--planner", default="periodic")
    parser.add_argument("--output", type=Path, default=RESULTS / "world_sizes.md")
    arguments = parser.parse_args()
    worlds: list[World] = []
    for size in arguments.worlds:
        worlds.append(plan_world(size, arguments))
        print("\n".join([*rows_of(worlds[-1]), checked(worlds[-1])]), flush=True)
    title = (
        f"GPT of {worlds[0].num_parameters / 1e9:.2f} billion parameters, {arguments.batch_size}×{arguments.length} "
        f"tokens a rank, {PRECISION}"
    )
    told = (
        f"{title}; fused AdamW, `{arguments.planner}`. Seconds are estimates for {arguments.device} and gathers of "
        f"{arguments.gigabytes:g} GB/s that nothing hides. Written by `python recipes/benchmarks/world_sizes.py` "
        f"(torch {torch.__version__}), in one process."
    )
    table = HEADER + "\n".join(row for world in worlds for row in rows_of(world))
    lines = "\n".join(f"- {checked(world)}" for world in worlds)
    picture = arguments.output.with_suffix(".png")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(f"# A world on a laptop\n\n{told}\n\n![]({picture.name})\n\n{table}\n\n{lines}\n")
    draw(worlds, picture, title)


if __name__ == "__main__":
    main()
