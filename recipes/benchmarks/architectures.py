"""How each architecture is captured, whether its steps stay bitwise equal, and what its lowest peak saves.

python recipes/benchmarks/architectures.py [resnet gpt2 …] [--source timm] [--missing] [--seconds 300]

Every network of `remat_recipes.networks.zoo` (or those whose names contain one of the words given, or of a source) is
trained for two steps plainly and two at the lowest peak, on real tensors at a small size, and both are compared bit
by bit: outputs, gradients, buffers, random state. Each runs in a process of its own, which is ended after so many
seconds. What is found goes to recipes/results/architectures.jsonl at once, a line a network, so that a run that was
interrupted goes on by `--missing`; recipes/results/architectures.md is written from all of these lines.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import importlib.util
import json
import multiprocessing
import random
import re
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from lightning_remat import PLANNERS, Graph, InfeasibleBudgetError, Plan, Schedule, measure_peak, rematerialize
from lightning_remat.regions.self_check import fingerprint

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.peaks import LOSS_BYTES, measured_peak
from remat_recipes.networks.zoo import ARCHITECTURES, Architecture

RESULTS = Path(__file__).parent.parent / "results" / "architectures.md"
FOUND = RESULTS.with_suffix(".jsonl")
LIBRARIES = ("torch", "torchvision", "timm", "segmentation_models_pytorch", "transformers", "diffusers")
NUM_STEPS = 2
MATTERS = 0.4
"""The share of the plain peak from which on activations are worth a mean over networks."""

HEADER = (
    "| source | architecture | graphs | breaks | bitwise equal | recomputed | plain peak | activations | predicted | "
    "measured | activations saved | seconds |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Found:
    """What became of one network.

    Attributes:
        source: Its library.
        name: Its name there.
        error: Why there is nothing else to tell; empty otherwise.
        num_graphs: Of which the planned part of its forward consists.
        num_breaks: Places at which TorchDynamo captured nothing.
        different: What was not bitwise equal to the plain steps.
        num_recomputed: Operations that run again.
        plain_bytes: Measured peak of a plain step.
        owned_bytes: What parameters, their gradients, buffers and inputs take of it.
        predicted_bytes: At the lowest peak.
        measured_bytes: There.
        seconds: To capture, profile and plan, twice: once to learn the lowest peak and once for it.
    """

    source: str
    name: str
    error: str = ""
    num_graphs: int = 0
    num_breaks: int = 0
    different: tuple[str, ...] = ()
    num_recomputed: int = 0
    plain_bytes: int = 0
    owned_bytes: int = 0
    predicted_bytes: int = 0
    measured_bytes: int = 0
    seconds: float = 0.0

    @property
    def activation_bytes(self) -> int:
        """What the plain step needs beside what is alive in any case."""
        return self.plain_bytes - self.owned_bytes

    @property
    def saved(self) -> float:
        """The part of the activations that the lowest peak does without."""
        return (self.plain_bytes - self.measured_bytes) / max(1, self.activation_bytes)

    @property
    def excess(self) -> float:
        """By how much more than predicted was measured."""
        return self.measured_bytes / max(1, self.predicted_bytes) - 1

    @property
    def is_over(self) -> bool:
        """Whether that is more than a hundredth."""
        return not self.error and self.excess > 0.01

    @property
    def verdict(self) -> str:
        """In one word."""
        if self.error:
            return "failed"
        return "wrong" if self.different else "exact" if self.num_recomputed else "plain"


def quick_auto(graph: Graph, budget_bytes: int, *, like: Graph | None = None) -> Schedule:
    """The default planner with little effort."""
    return PLANNERS["auto"](graph, budget_bytes, effort=0.02, like=like)


def step(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs, gradients, buffers and random states of a few training steps."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the state that models draw their masks from
    found: dict[str, Tensor] = {}
    for number in range(NUM_STEPS):
        module.zero_grad()
        outputs = [t for t in tree_leaves(module(*args, **kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        torch.stack([t.float().square().mean() for t in outputs]).sum().backward()
        found |= {f"output {i} of step {number}": t.detach() for i, t in enumerate(outputs)}
    found |= {f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    found |= {name: b.clone() for name, b in module.named_buffers()} | {"random state": torch.get_rng_state()}
    others = random.random(), np.random.random()  # noqa: NPY002
    return found | {"random numbers of python and numpy": torch.tensor(others)}


def differences(plain: dict[str, Tensor], ours: dict[str, Tensor]) -> tuple[str, ...]:
    """What is not the same in every bit."""
    missing = tuple(plain.keys() ^ ours.keys())
    return missing or tuple(n for n in plain if fingerprint(plain[n]) != fingerprint(ours[n]))


def rematerialize_lowest(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Rewrites the module for the lowest peak that a quick search finds; that budget must then be met."""
    try:
        return rematerialize(module, *args, memory_budget=1, planner=quick_auto, **kwargs)
    except InfeasibleBudgetError as error:
        lowest = error.sufficient_bytes
    return rematerialize(module, *args, memory_budget=lowest, planner=quick_auto, **kwargs)


def try_out(architecture: Architecture) -> Found:
    """Trains a network plainly, and at its lowest peak."""
    torch.manual_seed(0)
    plain = architecture.build()
    args, kwargs = architecture.arguments()
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    ours = copy.deepcopy(plain)
    expected, plain_bytes = step(plain, args, kwargs), measured_peak(plain, *args, **kwargs)
    with measure_peak(include=[plain, *inputs]) as owned:  # gradients, which have come, are counted
        pass
    counters.clear()
    start = time.perf_counter()
    made = rematerialize_lowest(ours, args, kwargs)
    seconds = time.perf_counter() - start
    num_breaks = len(counters["graph_break"])
    return Found(
        architecture.source,
        architecture.name,
        num_graphs=1 if made.step is None else len(made.step.plans),
        num_breaks=num_breaks,
        different=differences(expected, step(ours, args, kwargs)),
        num_recomputed=made.num_recomputed,
        plain_bytes=plain_bytes,
        owned_bytes=owned.peak_bytes,
        predicted_bytes=made.peak_bytes + LOSS_BYTES,
        measured_bytes=measured_peak(ours, *args, **kwargs),
        seconds=seconds,
    )


def _told(architecture: Architecture, to: Connection) -> None:
    try:
        found = try_out(architecture)
    except Exception as error:  # one network's failure is a line of the table
        found = Found(architecture.source, architecture.name, error=_in_one_line(error))
    to.send(found)


def _in_one_line(error: BaseException) -> str:
    """What went wrong, without the files in which it did on this machine."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"[\w./-]*/(site-packages|recipes|lightning_remat)/", "", text)[:300]


def try_apart(architecture: Architecture, seconds: float) -> Found:
    """`try_out` in a process of its own, which is ended when the time is over."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_told, args=(architecture, theirs))
    process.start()
    theirs.close()
    try:
        if ours.poll(seconds):
            return ours.recv()
        return Found(architecture.source, architecture.name, error=f"took more than {seconds:.0f} seconds")
    except EOFError:
        process.join()
        return Found(architecture.source, architecture.name, error=f"ended by {process.exitcode}")
    finally:
        process.kill()
        process.join()


def cells(found: Found) -> str:
    """A line of the table."""
    start = f"| {found.source} | {found.name} |"
    if found.error:
        return f"{start} {'| ' * 9}|"
    equal = "yes" if not found.different else f"NO: {found.different[0]}"
    sizes = (found.plain_bytes, found.activation_bytes, found.predicted_bytes, found.measured_bytes)
    return (
        f"{start} {found.num_graphs} | {found.num_breaks} | {equal} | {found.num_recomputed} | "
        f"{' | '.join(f'{size / 2**20:,.1f} MiB' for size in sizes)} | {found.saved:.0%} | {found.seconds:.1f} |"
    )


def summary(rows: Sequence[Found]) -> str:
    """How many are exact, and what they save."""
    count = {verdict: [r for r in rows if r.verdict == verdict] for verdict in ("exact", "wrong", "plain", "failed")}
    half = [r.saved for r in rows if not r.error and r.activation_bytes > MATTERS * r.plain_bytes]
    over = [r for r in rows if r.is_over]
    return (
        f"Of {len(rows)} networks, {len(count['exact'])} are rematerialized with exactly the plain results, "
        f"{len(count['wrong'])} wrong, {len(count['plain'])} left as they are, {len(count['failed'])} failed. Where "
        f"activations are more than {MATTERS:.0%} of the plain peak ({len(half)} networks), the lowest peak saves "
        f"{statistics.median(half) if half else 0:.0%} of them (median). {len(over)} took 1 % more than predicted."
    )


def table(rows: Sequence[Found]) -> str:
    """The Markdown page: the command, the summary, the rows, what failed."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES if _is_there(name))
    notes = [f"- {r.name}: {r.error}" for r in rows if r.error]
    notes += [
        f"- {r.name}: measured {r.excess:.1%} more than predicted" for r in rows if not r.error and r.excess > 0.01
    ]
    lines = [f"`python recipes/benchmarks/architectures.py`, {versions}", "", summary(rows), "", HEADER]
    return "\n".join([*lines, *map(cells, rows), *(["", *notes] if notes else [])]) + "\n"


def _is_there(library: str) -> bool:
    return library == "recipes" or importlib.util.find_spec(library) is not None


def known() -> dict[tuple[str, str], Found]:
    """The last line of each network in the file of what was found."""
    lines = FOUND.read_text().splitlines() if FOUND.exists() else []
    rows = [Found(**data | {"different": tuple(data["different"])}) for data in map(json.loads, lines)]
    return {(row.source, row.name): row for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""])
    parser.add_argument("--source", default="", help="networks of this library only")
    parser.add_argument("--missing", action="store_true", help="only networks of which nothing is known, or a failure")
    parser.add_argument("--seconds", type=float, default=300.0, help="for one network at most")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = [a for a in ARCHITECTURES if any(n.lower() in a.name.lower() for n in arguments.names)]
    chosen = [a for a in chosen if arguments.source in ("", a.source)]
    if arguments.missing:
        before = known()
        chosen = [a for a in chosen if (a.source, a.name) not in before or before[a.source, a.name].error]
    for source in dict.fromkeys(a.source for a in chosen):
        if _is_there(source):
            importlib.import_module("networks" if source == "recipes" else source)  # once, not in every process
        else:
            print(f"{source} is not installed: its networks are left out")
    for architecture in (a for a in chosen if _is_there(a.source)):
        found = try_apart(architecture, arguments.seconds)
        with FOUND.open("a") as file:
            file.write(json.dumps(asdict(found)) + "\n")
        print(cells(found), found.error, flush=True)
    rows = known()
    ordered = [rows[a.source, a.name] for a in ARCHITECTURES if (a.source, a.name) in rows]
    FOUND.write_text("".join(json.dumps(asdict(row)) + "\n" for row in ordered))
    RESULTS.write_text(table(ordered))
    print(summary(ordered))


if __name__ == "__main__":
    main()
