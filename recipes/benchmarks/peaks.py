"""Plain, predicted and measured peak of torchvision networks at paper size, on fake tensors: the README's table.

python recipes/benchmarks/peaks.py [resnet50 vgg19 …] [--planner auto] [--batch-size 32] [--budgets 0.75 0.5]
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_leaves

from lightning_remat import InfeasibleBudgetError, measure_peak, rematerialize, restore
from lightning_remat.budget import format_bytes

LOSS_BYTES = 8
"""What the loss of `take_step` takes, which is in no plan: a number and its gradient."""


class TakesGradients(torch.autograd.Function):
    """A loss that holds the outputs until its backward, and then makes a gradient for each."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.save_for_backward(*outputs)
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> Any:
        return tuple(torch.ones_like(t) for t in ctx.saved_tensors)


def take_step(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """A forward and a backward in which nobody but the loss holds outputs."""
    outputs = [t for t in tree_leaves(module(*args, **kwargs)) if isinstance(t, Tensor) and t.requires_grad]
    loss = TakesGradients.apply(*outputs)
    del outputs
    loss.backward()


def measured_peak(module: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Peak of one forward and backward, by the meter."""
    module.zero_grad(set_to_none=True)
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    with measure_peak(include=[module, *inputs]) as measured:
        take_step(module, *args, **kwargs)
    return measured.peak_bytes


def lowest_peak(module: nn.Module, x: Tensor, planner: str = "auto") -> int:
    """The least budget that `rematerialize` can meet."""
    try:
        rematerialize(module, x, memory_budget=1, planner=planner)
    except InfeasibleBudgetError as error:
        return error.sufficient_bytes
    raise AssertionError("one byte is not feasible")


def rows(name: str, batch_size: int, planner: str, budgets: list[float]) -> list[str]:
    """Table rows of one network: the plain step, one row a budget, the floor."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        module = copy.deepcopy(torchvision.models.get_model(name, weights=None))
    with mode:
        x = torch.randn(batch_size, 3, 224, 224)
        plain = rematerialize(module, x, memory_budget=1 << 62, planner="keep_all").peak_bytes
        measured = measured_peak(module, x)
        found = [f"| {name} | plain | {format_bytes(plain)} | {format_bytes(measured)} | |"]
        floor = lowest_peak(module, x, planner)
        for label, budget in [*((f"{b:.0%}", int(b * plain)) for b in budgets), ("lowest", floor)]:
            if budget < floor:
                found.append(f"| {name} | {label} | below the lowest peak | | |")
                continue
            made = rematerialize(module, x, memory_budget=budget, planner=planner)
            measured = measured_peak(module, x)
            restore(module)
            found.append(
                f"| {name} | {label} | {format_bytes(made.peak_bytes)} ({made.peak_bytes / plain:.1%}) | "
                f"{format_bytes(measured)} | {made.recompute_overhead:.1%} |"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=["resnet50", "densenet121", "googlenet", "vgg19"])
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.75, 0.5, 0.35])
    arguments = parser.parse_args()
    print("| network | budget | predicted peak | measured peak | recompute overhead |\n|---|---|---|---|---|")
    for name in arguments.networks:
        for row in rows(name, arguments.batch_size, arguments.planner, arguments.budgets):
            print(row, flush=True)


if __name__ == "__main__":
    main()
