"""What the executor costs when nothing is recomputed: interleaved steps, plain and executed, as a ratio.

python recipes/benchmarks/executor_overhead.py [--network resnet50] [--batch-size 8] [--size 112] [--steps 20]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
import torchvision
from torch import Tensor, nn

from lightning_remat import plan, profile, trace
from lightning_remat.execution.assembly import compile_schedule
from lightning_remat.execution.rewriter import forced


def seconds_of_step(module: nn.Module, x: Tensor) -> float:
    """Seconds of one forward and backward."""
    module.zero_grad(set_to_none=True)
    start = time.perf_counter()
    module(x).sum().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    plain = torchvision.models.get_model(arguments.network, weights=None)
    executed = copy.deepcopy(plain)
    x = torch.randn(arguments.batch_size, 3, arguments.size, arguments.size)
    traced = trace(executed, x)
    made = plan(profile(traced, x, repeats=1), 1 << 62, "keep_all")
    forced(executed, compile_schedule(traced, made.schedule, made.graph), made)
    pairs: list[tuple[float, float]] = []
    for k in range(arguments.steps + 2):
        # Each goes first in every other pair: what runs second finds memory that the first has just returned.
        order = (executed, plain) if k % 2 else (plain, executed)
        seconds = {id(module): seconds_of_step(module, x) for module in order}
        pairs.append((seconds[id(executed)], seconds[id(plain)]))
    del pairs[:2]
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    fastest = min(ours for ours, _ in pairs) / min(theirs for _, theirs in pairs)
    print(f"{arguments.network}, {arguments.steps} interleaved pairs of steps, executed over plain:")
    print(f"median of ratios {statistics.median(ratios):.3f}, ratio of the fastest {fastest:.3f}")


if __name__ == "__main__":
    main()
