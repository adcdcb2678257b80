"""Training steps on a device at the papers' batch sizes: predicted against measured peaks, and what the budgets cost.

    python recipes/benchmarks/device_steps.py --device cuda               # all networks
    python recipes/benchmarks/device_steps.py resnet50 --budgets 0.5 --batch-size 2 --rounds 3

For each network and budget: the planned peak, the measured one (on CUDA `max_memory_allocated`, cuDNN's workspaces and
the allocator's rounding included), and the seconds of a step over those of a plain one, steps interleaved, median of
the rounds. With `--largest` also the batch size that `find_batch_size` returns for the free memory of a CUDA device,
beside the largest at which the plain step does not run out of memory, found by trying. Written as Markdown with the
device's name and the versions; needs no Hydra.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torchvision
from torch import Tensor, nn

from benchmarks.paper_scale import NETWORKS, PaperNetwork
from lightning_remat import (
    Graph,
    InfeasibleBudgetError,
    Plan,
    find_batch_size,
    measure_peak,
    plan,
    profile,
    rematerialize,
    restore,
    trace,
)
from lightning_remat.budget import format_bytes
from lightning_remat.measure.out_of_memory import is_out_of_memory
from lightning_remat.measure.stopwatch import Stopwatch

HEADS = ("network", "batch", "budget", "predicted peak", "measured peak", "difference", "step time", "recomputation")


@dataclass(frozen=True, slots=True)
class Setup:
    """A network on its device with an input.

    Attributes:
        name: Of the network.
        module: In training mode.
        x: The input.
    """

    name: str
    module: nn.Module
    x: Tensor

    @classmethod
    def of(cls, name: str, network: PaperNetwork, batch_size: int, device: torch.device) -> Setup:
        """A freshly made network."""
        torch.manual_seed(0)
        return cls(name, network.build().to(device), network.batch(batch_size).to(device))

    def step(self) -> None:
        """Forward and backward by a loss that reads every output."""
        self.module.zero_grad(set_to_none=True)
        loss_of(self.module, self.x).backward()

    def peak_bytes(self) -> int:
        """Of a step, measured."""
        self.module.zero_grad(set_to_none=True)
        with measure_peak(self.x.device, [self.module, self.x]) as measured:
            self.step()
        return measured.peak_bytes

    def seconds(self) -> float:
        """Of a step."""
        watch = Stopwatch(self.x.device)
        with watch:
            self.step()
        return watch.seconds

    def ratio(self, made: Plan, rounds: int) -> float:
        """Seconds of a planned step over those of a plain one, in turns; the first turn warms up."""
        ratios: list[float] = []
        for _ in range(rounds + 1):
            restore(self.module)
            plain = self.seconds()
            rematerialize(self.module, self.x, plan=made)
            ratios.append(self.seconds() / plain)
        return statistics.median(ratios[1:])


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    """A loss whose backward reads the output."""
    return module(x).square().mean()


def budgets_of(graph: Graph, fractions: list[float]) -> Iterator[tuple[str, int]]:
    """The fractions of the plain peak in bytes, and the lowest peak there is."""
    plain_bytes = plan(graph, 1 << 62, "keep_all").peak_bytes
    try:
        plan(graph, 1)
    except InfeasibleBudgetError as error:
        floor_bytes = error.sufficient_bytes
        yield from ((f"{f:.0%}", int(f * plain_bytes)) for f in fractions if f * plain_bytes >= floor_bytes)
        yield "lowest", floor_bytes


def rows(setup: Setup, fractions: list[float], rounds: int) -> Iterator[tuple[str, ...]]:
    """One row for the plain step, one for each budget that can be met."""
    setup.step()  # chooses algorithms, allocates the library's workspaces
    graph = profile(trace(setup.module, setup.x), setup.x)
    head = (setup.name, str(len(setup.x)))
    plain = plan(graph, 1 << 62, "keep_all")
    yield (*head, "plain", *compared(plain.peak_bytes, setup.peak_bytes()), "1.000×", "")
    for label, budget_bytes in budgets_of(graph, fractions):
        made = plan(graph, budget_bytes)
        rematerialize(setup.module, setup.x, plan=made)
        measured = setup.peak_bytes()
        times = f"{setup.ratio(made, rounds):.3f}×"
        yield (*head, label, *compared(made.peak_bytes, measured), times, f"+{made.recompute_overhead:.1%}")
        restore(setup.module)


def compared(predicted: int, measured: int) -> tuple[str, str, str]:
    return format_bytes(predicted), format_bytes(measured), f"{measured / predicted - 1:+.2%}"


def largest_sizes(name: str, network: PaperNetwork, device: torch.device) -> tuple[str, ...]:
    """The batch size found for the device's free memory beside the plain step's true limit."""
    setup = Setup.of(name, network, network.small_batch_size, device)
    optimizer = torch.optim.SGD(setup.module.parameters(), 0.1, momentum=0.9)
    found = find_batch_size(setup.module, setup.x, lambda x: loss_of(setup.module, x), optimizer)
    for key in found.step.keys:
        restore(setup.module.get_submodule(key))

    def survives(batch_size: int) -> bool:
        try:
            x = network.batch(batch_size).to(device)
            loss_of(setup.module, x).backward()
            optimizer.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            optimizer.zero_grad()
            gc.collect()
            torch.cuda.empty_cache()
        return True

    limit = largest(survives)
    measured = format_bytes(found.measured_peak_bytes or 0)
    gain, overhead = f"{found.batch_size / max(1, limit):.2f}×", f"+{found.recompute_overhead:.1%}"
    return name, str(limit), str(found.batch_size), gain, overhead, measured, str(found.num_steps)


def largest(survives: Callable[[int], bool]) -> int:
    """The largest number that survives, if all smaller ones do; 0 if none does."""
    high = 1
    while survives(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if survives(middle) else (low, middle)
    return low


def table(heads: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ("---",) * len(heads), *lines))


def where(device: torch.device) -> str:
    """The device by its name, and the versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    cuda = f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}" if device.type == "cuda" else ""
    return f"{name}; torch {torch.__version__}, torchvision {torchvision.__version__}{cuda}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.75, 0.5, 0.35])
    parser.add_argument("--batch-size", type=int, help="instead of the papers'")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--largest", action="store_true", help="also the largest batch sizes, on CUDA")
    parser.add_argument("--output", type=Path, help="a Markdown file for the tables")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.largest and device.type != "cuda":
        parser.error("--largest runs out of memory on purpose, which only CUDA survives: use batch_size_finder.py")
    lines: list[tuple[str, ...]] = []
    sizes: list[tuple[str, ...]] = []
    for name in arguments.networks:
        network = NETWORKS[name]
        setup = Setup.of(name, network, arguments.batch_size or network.batch_size, device)
        for row in rows(setup, arguments.budgets, arguments.rounds):
            lines.append(row)
            print(*row, sep=" | ", flush=True)
        del setup
        if arguments.largest:
            sizes.append(largest_sizes(name, network, device))
            print(*sizes[-1], sep=" | ", flush=True)
    text = f"# Steps on {where(device)}\n\n{table(HEADS, lines)}\n"
    if sizes:
        heads = ("network", "plain limit", "found", "gain", "recomputation", "measured peak", "real steps")
        text += f"\n{table(heads, sizes)}\n"
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
