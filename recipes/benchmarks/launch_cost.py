"""What calls cost beside kernels: steps of tiny tensors, plain, rematerialized and checkpointed, one thread.

Processor time of the thread that launches, contenders in turn; medians, and medians of ratios within a turn. Writes
recipes/results/launch_cost.md. "kept" runs by a program that recomputes nothing (`rematerialize` would leave the module
as it is); "at its peak" is planned for the peak that was measured with `torch.utils.checkpoint` on every block.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.models.resnet import Bottleneck, ResNet
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_remat import InfeasibleBudgetError, Plan, TraceError, measure_peak, plan, profile, rematerialize, trace
from lightning_remat.execution.assembly import compile_schedule
from lightning_remat.execution.rewriter import forced

sys.path.insert(0, str(Path(__file__).parent.parent))
from remat_recipes.networks.lstm import LSTM

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


@dataclass(frozen=True)
class Network:
    """A network of tiny tensors.

    Attributes:
        make: Builds it.
        batch: Its input.
        blocks: The parts that `torch.utils.checkpoint` is put on; none where there are no such parts.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    blocks: Callable[[Any], Iterator[nn.Module]] = field(default=lambda _: iter(()))


NETWORKS = {
    "transformer MLP, 60 blocks of width 8": Network(
        lambda: nn.Sequential(*(Perceptron(8) for _ in range(60))), lambda: torch.randn(64, 8), nn.Module.children
    ),
    "conv-BN-ReLU, 30 residual blocks of width 8": Network(
        lambda: nn.Sequential(*(Residual(8) for _ in range(30))), lambda: torch.randn(16, 8, 8, 8), nn.Module.children
    ),
    "LSTM of elementary operations, 2 layers of 8, 16 steps": Network(
        lambda: LSTM(20, 8, 8, num_layers=2, num_steps=16, cell="elementary"), lambda: torch.randint(20, (64, 16))
    ),
    "LSTM of nn.LSTMCell, 2 layers of 8, 16 steps": Network(
        lambda: LSTM(20, 8, 8, num_layers=2, num_steps=16), lambda: torch.randint(20, (64, 16))
    ),
    "timm ViT, 12 blocks of width 16": Network(
        lambda: VisionTransformer(img_size=16, patch_size=4, embed_dim=16, depth=12, num_heads=2, num_classes=10),
        lambda: torch.randn(8, 3, 16, 16),
        lambda m: m.blocks.children(),
    ),
    "GPT-2 of transformers, 12 blocks of width 16": Network(
        lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=12, n_head=2, use_cache=False)
        ),
        lambda: torch.randint(64, (8, 16)),
        lambda m: m.transformer.h.children(),
    ),
    "ResNet-152 at an eighth of its width": Network(
        lambda: ResNet(Bottleneck, [3, 8, 36, 3], width_per_group=8),
        lambda: torch.randn(4, 3, 32, 32),
        lambda m: (b for layer in (m.layer1, m.layer2, m.layer3, m.layer4) for b in layer),
    ),
}


def loss_of(outputs: Any) -> Tensor:
    """The sum of what a network answers."""
    return (outputs if isinstance(outputs, Tensor) else outputs.logits).sum()


def seconds_of(module: nn.Module, x: Tensor) -> float:
    """Processor time of one forward and backward in this thread, whose gradients are new as in training."""
    module.zero_grad()
    start = time.thread_time()
    loss_of(module(x)).backward()
    return time.thread_time() - start


def peak_of(module: nn.Module, x: Tensor) -> int:
    """Bytes of one step."""
    module.zero_grad()
    with measure_peak(None, [module, x]) as measured:
        loss_of(module(x)).backward()
    return measured.peak_bytes


def checkpointed(plain: nn.Module, network: Network) -> nn.Module | None:
    """A copy with `torch.utils.checkpoint` on its blocks, or None without such."""
    module = copy.deepcopy(plain)
    blocks = list(network.blocks(module))
    for block in blocks:
        inside = block.forward
        block.forward = lambda *args, _inside=inside, **kwargs: checkpoint(
            _inside, *args, use_reentrant=False, **kwargs
        )
    return module if blocks else None


def planned(plain: nn.Module, x: Tensor, budget: int | str) -> tuple[nn.Module, Plan] | None:
    """A rematerialized copy and its plan, or None where the budget cannot be met."""
    ours = copy.deepcopy(plain)
    try:
        return ours, rematerialize(ours, x, memory_budget=budget)
    except InfeasibleBudgetError:
        return None


def kept(plain: nn.Module, x: Tensor) -> tuple[nn.Module, Plan] | None:
    """A copy that runs by a program and keeps everything, or None where its forward is several graphs."""
    ours = copy.deepcopy(plain)
    try:
        traced = trace(ours, x)
    except TraceError:
        return None
    made = plan(profile(traced, x, repeats=1), 1 << 62, "keep_all")
    forced(ours, compile_schedule(traced, made.schedule, made.graph), made)
    return ours, made


def contenders_of(plain: nn.Module, x: Tensor, network: Network) -> dict[str, tuple[nn.Module, Plan | None]]:
    """What is compared with the plain network, and the plans of ours."""
    found: dict[str, tuple[nn.Module, Plan | None]] = {"plain": (plain, None)}
    if (ours := kept(plain, x)) is not None:
        found["kept"] = ours
    for budget in ("85%", "50%"):
        if (ours := planned(plain, x, budget)) is not None:
            found[budget] = ours
    other = checkpointed(plain, network)
    if other is not None:
        peak_of(other, x)
        if (ours := planned(plain, x, peak_of(other, x))) is not None:
            found["at its peak"] = ours
        found["checkpoint"] = (other, None)
    return found


def rows_of(name: str, network: Network, rounds: int) -> Iterator[str]:
    """The rows of one network."""
    torch.manual_seed(0)
    plain, x = network.make(), network.batch()
    contenders = contenders_of(plain, x, network)
    seconds: dict[str, list[float]] = {key: [] for key in contenders}
    for _ in range(rounds + 5):
        for key, (module, _) in contenders.items():
            seconds[key].append(seconds_of(module, x))
    for key, measured in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(measured[5:], seconds["plain"][5:], strict=True))
        made = contenders[key][1]
        told = ["", "", ""]
        if made is not None:
            runs = sum(a.kind == "F" for a in made.schedule) - len(made.graph.nodes)
            told = [str(len(made.graph.nodes)), str(runs), f"{1 + made.recompute_overhead:.2f}"]
        peak = peak_of(contenders[key][0], x)
        columns = [name, key, f"{statistics.median(measured[5:]) * 1e3:.1f}", f"{ratio:.2f}", told[2], *told[:2]]
        yield f"| {' | '.join(columns)} | {peak / 1024:.0f} |"


HEADER = """| network | step | processor time (ms) | over plain | predicted | operations | runs again | peak (KiB) |
|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="beginnings of the networks' names; all without")
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [n for n in NETWORKS if not arguments.names or n.startswith(tuple(arguments.names))]
    print(HEADER, end="")
    rows: list[str] = []
    for name in chosen:
        for row in rows_of(name, NETWORKS[name], arguments.rounds):
            print(row, flush=True)
            rows.append(row)
    if not arguments.names:
        told = (
            f"Written by `python recipes/benchmarks/launch_cost.py` (torch {torch.__version__}, one thread of a CPU)."
        )
        table = HEADER + "\n".join(rows)
        RESULTS.write_text(f"# What calls cost beside kernels\n\n{told}\n\n{table}\n")


if __name__ == "__main__":
    main()
