"""Predicted against allocated: peaks of whole steps on the CPU by PyTorch's allocator, kernels' own tensors included.

    python recipes/benchmarks/predicted_allocated.py --output recipes/results/predicted_allocated.md

Each network runs forward and backward by the plain schedule, by one for half of the plain peak where there is one, and
by the lowest. Predicted is by a profile with and without what kernels allocate inside themselves.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torchvision import models

from benchmarks.peaks import take_step
from lightning_remat import Graph, InfeasibleBudgetError, Plan, plan, profile, rematerialize, restore, simulate, trace
from lightning_remat.budget import format_bytes
from lightning_remat.measure.allocated_growth import Peak, heard, listen
from lightning_remat.measure.tensor_bytes import storage_bytes
from remat_recipes.networks.unet import UNet

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": models.resnet50,
    "densenet121": models.densenet121,
    "vit": lambda: models.VisionTransformer(64, 8, 6, 6, 192, 768),
    "unet": lambda: UNet(3, 5, 32, 4, padded=True, batch_norm=True),
}
HEADS = ("network", "budget", "allocated", "predicted", "difference", "without kernels", "difference")


@contextmanager
def measure_allocated_growth() -> Generator[Peak]:
    """Measures by how much what is allocated in a block exceeds what was allocated at its start, at most.

    Unlike a meter of storages this changes nothing of how autograd sums gradients.

    Raises:
        RuntimeError: A profiler is running.
    """
    measured = Peak()
    listen()
    try:
        yield measured
    finally:
        measured.peak_bytes = heard()


def allocated_peak(module: nn.Module, x: Tensor) -> int:
    """Of a step, everything counted."""
    take_step(module, x)  # which learns, and makes what kernels keep
    module.zero_grad(set_to_none=True)
    gc.collect()
    with measure_allocated_growth() as measured:
        take_step(module, x)
    module.zero_grad(set_to_none=True)
    return measured.peak_bytes + storage_bytes([*module.parameters(), *module.buffers(), x])


def plans(graph: Graph, planner: str) -> Iterator[tuple[str, Plan | None]]:
    """Those of the table; None where the planner has none within the budget."""
    plain = plan(graph, 1 << 62, "keep_all")
    yield "plain", plain
    try:
        yield "50%", plan(graph, plain.peak_bytes // 2, planner)
    except InfeasibleBudgetError:
        yield "50%", None
    try:
        plan(graph, 1, planner)
    except InfeasibleBudgetError as error:
        yield "lowest", plan(graph, error.sufficient_bytes, planner)


def rows(name: str, batch_size: int, image_size: int, planner: str) -> Iterator[tuple[str, ...]]:
    """Of one network."""
    torch.manual_seed(0)
    module, x = NETWORKS[name](), torch.randn(batch_size, 3, image_size, image_size)
    traced = trace(module, x)
    true, known = (profile(traced, x, repeats=1, with_kernels=kernels) for kernels in (True, False))
    for label, made in plans(true, planner):
        if made is None:
            yield name, label, "does not fit", *("",) * (len(HEADS) - 3)
            continue
        if label != "plain":
            rematerialize(module, x, plan=made)
        allocated, other = allocated_peak(module, x), simulate(known, made.schedule)
        restore(module)
        predictions = [_compared(one.peak_bytes, allocated) for one in (made, other)]
        yield name, label, format_bytes(allocated), *predictions[0], *predictions[1]


def _compared(predicted: int, allocated: int) -> tuple[str, str]:
    return format_bytes(predicted), f"{predicted / allocated - 1:+.2%}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--planner", default="rotor")
    parser.add_argument("--output", type=Path, help="write the table there too, as Markdown")
    arguments = parser.parse_args()
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for name in arguments.networks:
        for cells in rows(name, arguments.batch_size, arguments.image_size, arguments.planner):
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    command = f"    python recipes/benchmarks/{Path(__file__).name} {' '.join(sys.argv[1:])}"
    title = f"# Predicted and allocated peaks of steps on the CPU, torch {torch.__version__}"
    if arguments.output is not None:
        arguments.output.write_text("\n".join([title, "", *lines, "", "Made by", "", command, ""]))


if __name__ == "__main__":
    main()
