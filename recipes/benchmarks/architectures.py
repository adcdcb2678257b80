"""How each architecture is captured, whether its step stays bitwise equal, and what half of its memory costs.

python recipes/benchmarks/architectures.py [resnet50 gpt …] [--planner auto] [--effort 0.02]

Every network of `networks.zoo` (or those whose names contain one of the words given) is trained for a step on real
tensors at a small size, plainly and at a lowest peak, and both are compared bit by bit: outputs, gradients,
buffers, random state. Peak and overhead are those of a step at 224 pixels or 256 tokens on fake tensors, planned for
half of the plain peak. A run of all networks writes recipes/results/architectures.md.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_leaves

from lightning_remat import (
    Graph,
    InfeasibleBudgetError,
    Plan,
    Schedule,
    TraceError,
    plan,
    profile,
    rematerialize,
    simulate,
    trace,
)
from lightning_remat.lowering import lower_kept

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.peaks import measured_peak
from networks.zoo import ARCHITECTURES, Architecture

RESULTS = Path(__file__).parent.parent / "results" / "architectures.md"
LIBRARIES = ("torch", "torchvision", "timm", "segmentation_models_pytorch", "transformers")
HEADER = (
    "| source | architecture | rung | nodes | bitwise equal | recomputed there | plain peak | peak for half of it "
    "| reduction | overhead | seconds to trace, profile, plan |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def step(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Outputs, gradients, buffers and random state of one training step."""
    torch.manual_seed(1)
    module.zero_grad()
    outputs = [t for t in tree_leaves(module(x)) if isinstance(t, Tensor) and t.requires_grad]
    torch.stack([t.square().mean() for t in outputs]).sum().backward()
    found = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    found |= {f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    return found | dict(module.named_buffers()) | {"random state": torch.get_rng_state()}


def differences(plain: dict[str, Tensor], ours: dict[str, Tensor]) -> list[str]:
    """What is not the same in every bit."""
    assert plain.keys() == ours.keys()
    return [name for name in plain if not torch.equal(plain[name].nan_to_num(), ours[name].nan_to_num())]


@dataclass(frozen=True)
class Trial:
    """A real step at a small size under a plan.

    Attributes:
        plan: The plan, at a planner's lowest peak, with the rung on which the network was captured, and why.
        different: What is not bitwise equal to the plain step.
        peak_bytes: Measured.
    """

    plan: Plan
    different: list[str]
    peak_bytes: int


def lowest(module: nn.Module, x: Tensor) -> Plan:
    """The plan for the lowest peak of a quick planner, or of a thorough one where the quick one recomputes nothing.

    Where that does not either, all that can be is recomputed.
    """
    traced = trace(module, x)
    graph = profile(traced, x, repeats=1)
    made = _at_lowest(graph, "chen_cheap")
    if not made.num_recomputed:
        made = _at_lowest(graph, "auto", effort=0.02)
    if not made.num_recomputed:  # parameters outweigh all else, so that nothing is gained
        made = plan(graph, simulate(graph, keep_nothing(graph, 0)).peak_bytes, keep_nothing)
    return replace(made, rung=traced.rung, reasons=traced.reasons)


def keep_nothing(graph: Graph, budget_bytes: int) -> Schedule:
    """All that is not read in the forward any more is recomputed, whatever the budget."""
    return lower_kept(graph, ())


def _at_lowest(graph: Graph, planner: str, **options: float) -> Plan:
    try:
        return plan(graph, 1, planner, **options)
    except InfeasibleBudgetError as error:
        return plan(graph, int(error.minimum_bytes), planner, **options)


def try_small(architecture: Architecture) -> Trial:
    """Trains one step plainly and one at the lowest peak.

    Raises:
        TraceError: The network is left alone.
    """
    torch.manual_seed(0)
    plain = architecture.build()
    x = architecture.inputs(*architecture.small)
    ours = copy.deepcopy(plain)
    made = lowest(ours, x)
    rematerialize(ours, x, plan=made)
    different = differences(step(plain, x), step(ours, x))
    return Trial(made, different, measured_peak(ours, x))


def plan_large(architecture: Architecture, planner: str, **options: float) -> tuple[Plan, bool, str]:
    """The plan for half of the plain peak, or for the lowest; whether it is the former; seconds of the stages."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        module = copy.deepcopy(architecture.build())
    with mode:
        x = architecture.inputs(*architecture.large)
        times = [time.process_time()]
        traced = trace(module, x)
        times.append(time.process_time())
        graph = profile(traced, x)
        times.append(time.process_time())
    half = plan(graph, 1 << 62, "keep_all").peak_bytes // 2
    try:
        made, is_half = plan(graph, half, planner, **options), True
    except InfeasibleBudgetError as error:
        made, is_half = plan(graph, int(error.minimum_bytes), planner, **options), False
    times.append(time.process_time())
    return made, is_half, ", ".join(f"{after - before:.1f}" for before, after in pairwise(times))


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: That of the architecture.
        cells: Its text.
        is_rematerialized: Whether the small step recomputed and was bitwise equal.
        is_wrong: Whether it was not.
        reasons: Why parts of the network run as one operation, or why it is left alone.
    """

    name: str
    cells: str
    is_rematerialized: bool
    is_wrong: bool
    reasons: tuple[str, ...]


def row(architecture: Architecture, planner: str, **options: float) -> Row:
    """What happens to one architecture."""
    start = f"| {architecture.source} | {architecture.name} |"
    try:
        trial = try_small(architecture)
        made, is_half, seconds = plan_large(architecture, planner, **options)
    except TraceError as error:
        return Row(
            architecture.name, f"{start} left alone | | | | | | | | |", False, False, (_without_place(str(error)),)
        )
    equal = "yes" if not trial.different else f"NO: {trial.different[0]}"
    plain, peak, note = made.plain.peak_bytes, made.peak_bytes, "" if is_half else " (lowest)"
    reasons = tuple(_without_place(reason) for reason in trial.plan.reasons)
    rung = trial.plan.rung if not reasons else f"{trial.plan.rung} ({len(reasons)})"
    cells = (
        f"{start} {rung} | {len(made.graph.nodes)} | {equal} | {trial.plan.num_recomputed} | "
        f"{plain / 2**20:,.0f} MiB | {peak / 2**20:,.0f} MiB{note} | {1 - peak / plain:.0%} | "
        f"{made.recompute_overhead:.1%} | {seconds} |"
    )
    return Row(
        architecture.name, cells, trial.plan.num_recomputed > 0 and not trial.different, bool(trial.different), reasons
    )


def _without_place(reason: str) -> str:
    """A reason without the file in which it lies on this machine."""
    return re.sub(r" \(at [^()]*?: (?P<line>'[^']*'|\"[^\"]*\")\)", r" (at \g<line>)", reason)


def summary(rows: Sequence[Row]) -> str:
    """How many are rematerialized, and how many wrong."""
    done, wrong = sum(r.is_rematerialized for r in rows), sum(r.is_wrong for r in rows)
    return (
        f"{done} of {len(rows)} ({done / len(rows):.0%}) are rematerialized with exactly the plain results, "
        f"{wrong} wrong, {len(rows) - done - wrong} left as they are."
    )


def table(rows: Sequence[Row], planner: str, effort: float) -> str:
    """The Markdown page: the command, the rows, the summary, the reasons."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    command = f"python recipes/benchmarks/architectures.py --planner {planner} --effort {effort}"
    notes = [f"- {r.name}: {reason}" for r in rows for reason in r.reasons]
    lines = [f"`{command}`, {versions}", "", summary(rows), "", HEADER, *(r.cells for r in rows)]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""])
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--effort", type=float, default=0.02, help="of the planner auto")
    arguments = parser.parse_args()
    options = {"effort": arguments.effort} if arguments.planner == "auto" else {}
    rows: list[Row] = []
    for architecture in ARCHITECTURES:
        if any(name.lower() in architecture.name.lower() for name in arguments.names):
            rows.append(row(architecture, arguments.planner, **options))
            print(rows[-1].cells, flush=True)
    page = table(rows, arguments.planner, arguments.effort)
    print(page)
    if arguments.names == [""]:
        RESULTS.write_text(page)


if __name__ == "__main__":
    main()
