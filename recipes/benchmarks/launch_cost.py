"""What calls cost beside kernels: steps of tiny tensors, plain, rematerialized and checkpointed, one thread.

Processor time of the thread that launches, contenders in turn; medians, and medians of ratios within a turn. Writes
recipes/results/launch_cost.md.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_remat import InfeasibleBudgetError, rematerialize

RESULTS = Path(__file__).parent.parent / "results" / "launch_cost.md"


class Perceptron(nn.Module):
    """A block of a transformer without its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Residual(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.a, self.b = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.b(self.second(torch.relu(self.a(self.first(x))))))


class Checkpointed(nn.Module):
    """Every block under `torch.utils.checkpoint`."""

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


NETWORKS: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], Tensor]]] = {
    "transformer MLP, 60 blocks of width 8": (
        lambda: nn.Sequential(*(Perceptron(8) for _ in range(60))),
        lambda: torch.randn(64, 8),
    ),
    "conv-BN-ReLU, 30 residual blocks of width 8": (
        lambda: nn.Sequential(*(Residual(8) for _ in range(30))),
        lambda: torch.randn(16, 8, 8, 8),
    ),
}


def seconds_of(module: nn.Module, x: Tensor) -> float:
    """Processor time of one forward and backward in this thread."""
    start = time.thread_time()
    module(x).sum().backward()
    return time.thread_time() - start


def rows_of(name: str, rounds: int) -> list[str]:
    """The rows of one network."""
    make, batch = NETWORKS[name]
    torch.manual_seed(0)
    plain, x = make(), batch()
    contenders: dict[str, nn.Module] = {"plain": plain}
    notes: dict[str, str] = {"plain": ""}
    for budget in ("85%", "50%"):
        ours = copy.deepcopy(plain)
        try:
            made = rematerialize(ours, x, memory_budget=budget)
        except InfeasibleBudgetError:
            continue
        contenders[budget] = ours
        notes[budget] = (
            f"{made.num_recomputed} of {len(made.graph.nodes)} operations recomputed, "
            f"{made.recompute_overhead:.0%} predicted"
        )
    contenders["checkpoint"] = Checkpointed(copy.deepcopy(plain))
    notes["checkpoint"] = "`torch.utils.checkpoint` on every block"
    seconds: dict[str, list[float]] = {key: [] for key in contenders}
    for _ in range(rounds + 5):
        for key, module in contenders.items():
            seconds[key].append(seconds_of(module, x))
    rows: list[str] = []
    for key, measured in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(measured[5:], seconds["plain"][5:], strict=True))
        rows.append(f"| {name} | {key} | {statistics.median(measured[5:]) * 1e3:.1f} ms | {ratio:.2f} | {notes[key]} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    header = "| network | step | processor time | over plain | |\n|---|---|---|---|---|\n"
    rows = [row for name in NETWORKS for row in rows_of(name, arguments.rounds)]
    table = f"{header}{chr(10).join(rows)}\n"
    intro = (
        f"Written by `python recipes/benchmarks/launch_cost.py` (torch {torch.__version__}, one thread of a CPU).\n\n"
    )
    RESULTS.write_text(f"# What calls cost beside kernels\n\n{intro}{table}")
    print(table)


if __name__ == "__main__":
    main()
