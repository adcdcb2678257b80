"""`auto` against every other planner over 20 budgets from its floor to the plain peak, with measured peaks.

python recipes/benchmarks/auto_planner.py [resnet50 unet …] [--planners periodic,rotor] [--estimated]

Each network is planned at its paper's batch size: bytes from fake tensors, seconds from results/paper_seconds.json
(`--estimated`: from operation counts). At every budget the rewritten module takes a step on fake tensors, whose peak
is measured. Networks are added to results/auto_planner.json one by one; the tables of all are printed and written
beside it.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.paper_scale import NETWORKS, PaperNetwork
from benchmarks.paper_seconds import with_measured_seconds
from benchmarks.peaks import LOSS_BYTES, lowest_peak, measured_peak
from lightning_remat import (
    PLANNERS,
    Graph,
    InfeasibleBudgetError,
    Plan,
    plan,
    profile,
    rematerialize,
    restore,
    simulate,
    trace,
)
from lightning_remat.lowering import lower_kept
from lightning_remat.plans.explanation import explain

RESULTS = Path(__file__).resolve().parents[1] / "results"
WITHIN = 1e-9
"""Sums of the same seconds in another order differ by less, as a fraction of a step."""


@dataclass(frozen=True, slots=True)
class Point:
    """One budget: what `auto` found there and the best of the others.

    Attributes:
        budget_bytes: The true peak allowed.
        peak_bytes: The predicted peak of `auto`.
        measured_bytes: The peak of a step of the module rewritten by that plan, or None where none was taken.
        overhead: Recomputation of `auto` as a fraction of the plain step.
        least_overhead: A lower bound on that of any schedule within the budget.
        others: Overhead of each other planner that reaches the budget.
    """

    budget_bytes: int
    peak_bytes: int
    measured_bytes: int | None
    overhead: float
    least_overhead: float
    others: dict[str, float]

    @property
    def best_other(self) -> tuple[str, float] | None:
        """The fastest of the others and its overhead."""
        return min(self.others.items(), key=lambda pair: pair[1]) if self.others else None

    @property
    def loss(self) -> float:
        """By how much of a step the fastest of the others is faster, 0 where none is."""
        best = self.best_other
        return 0.0 if best is None or best[1] > self.overhead - WITHIN else self.overhead - best[1]


@dataclass(frozen=True, slots=True)
class Lowest:
    """The least budget that `rematerialize` can meet, in-place activations run out of place where that is lower.

    Attributes:
        budget_bytes: The budget.
        measured_bytes: The peak of a step then.
        forward_share: Recomputation as a fraction of a forward, by estimated seconds.
    """

    budget_bytes: int
    measured_bytes: int
    forward_share: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One network: its points from the lowest budget up, and what each planner's floor and time were.

    Attributes:
        name: Of `NETWORKS`.
        seconds: `"measured"` or `"estimated"`.
        num_nodes: Operations of the graph.
        plain_bytes: Peak of the plain step.
        plain_measured_bytes: The same, measured.
        forward_share: Forward seconds as a fraction of the plain step.
        overheads: `auto` at half and at 35 % of the plain peak and at the issue's target; None below its floor.
        planning_seconds: CPU seconds of each planner's first answer.
        floors: The lowest peak of each planner.
        setter: The operation and phase that no schedule gets below, and what is alive then.
        points: One for each budget.
        lowest: What `rematerialize` does at the least budget that it can meet; None where no step is measured.
    """

    name: str
    seconds: str
    num_nodes: int
    plain_bytes: int
    plain_measured_bytes: int | None
    forward_share: float
    overheads: dict[str, float | None]
    planning_seconds: dict[str, float]
    floors: dict[str, int]
    setter: tuple[str, int]
    points: tuple[Point, ...]
    lowest: Lowest | None = None

    @classmethod
    def from_json(cls, data: dict) -> Comparison:
        """What `asdict` made."""
        points = tuple(Point(**point) for point in data["points"])
        lowest = Lowest(**found) if (found := data.get("lowest")) else None
        return cls(**(data | {"points": points, "setter": tuple(data["setter"]), "lowest": lowest}))


class Step:
    """A network on fake tensors, whose step can be taken under a plan."""

    def __init__(self, network: PaperNetwork) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.mode:
            self.module: nn.Module = network.build()
            self.batch: Tensor = network.batch(network.batch_size)
            self.graph = profile(trace(self.module, self.batch), self.batch)

    def peak(self, planned: Plan | None) -> int:
        """The measured peak of a step, plain or rewritten."""
        with self.mode:
            if planned is None:
                return measured_peak(self.module, self.batch)
            rematerialize(self.module, self.batch, plan=planned)
            try:
                return measured_peak(self.module, self.batch)
            finally:
                restore(self.module)

    def lowest(self) -> Lowest:
        """A step at the least budget."""
        with self.mode:
            budget = lowest_peak(self.module, self.batch)
            made = rematerialize(self.module, self.batch, memory_budget=budget)
            try:
                forward = sum(node.forward_seconds for node in made.graph.nodes)
                measured = measured_peak(self.module, self.batch)
                return Lowest(budget, measured, made.simulation.recompute_seconds / forward)
            finally:
                restore(self.module)


def compare(name: str, rivals: Sequence[str], *, num_budgets: int, is_estimated: bool, num_measured: int) -> Comparison:
    """`auto` and the rivals at budgets from the floor of `auto` to the plain peak, both included."""
    step = Step(NETWORKS[name])
    graph = step.graph if is_estimated else with_measured_seconds(name, step.graph)
    planning, floors = {}, {}
    for planner in ("auto", *rivals):
        start = time.process_time()
        floors[planner] = floor_of(graph, planner)
        planning[planner] = time.process_time() - start
        print(f"{name}: {planner} planned in {planning[planner]:.1f} CPU s", file=sys.stderr, flush=True)
    plain = simulate(graph, lower_kept(graph, range(len(graph.nodes))))
    lowest = floors["auto"]
    budgets = [lowest + (plain.peak_bytes - lowest) * k // (num_budgets - 1) for k in range(num_budgets)]
    points: list[Point] = []
    for k, budget in enumerate(budgets):
        ours = plan(graph, budget)
        is_measured = k * num_measured // num_budgets != (k - 1) * num_measured // num_budgets
        found = {rival: attempt(graph, budget, rival) for rival in rivals if floors[rival] <= budget}
        points.append(
            Point(
                budget,
                ours.peak_bytes,
                step.peak(ours) if is_measured else None,
                ours.recompute_overhead,
                explain(ours).least_seconds / plain.seconds,
                {rival: p.recompute_overhead for rival, p in found.items() if p is not None},
            )
        )
    target = NETWORKS[name].lowest_reduction
    shares = {"half": 0.5, "35 %": 0.35} | ({"target": 1 - target} if target else {})
    at_shares = {label: attempt(graph, int(share * plain.peak_bytes), "auto") for label, share in shares.items()}
    floor = explain(plan(graph, lowest)).floor
    return Comparison(
        name=name,
        seconds="estimated" if is_estimated else "measured",
        num_nodes=len(graph.nodes),
        plain_bytes=plain.peak_bytes,
        plain_measured_bytes=step.peak(None) if num_measured else None,
        forward_share=sum(node.forward_seconds for node in graph.nodes) / plain.seconds,
        overheads={label: None if p is None else p.recompute_overhead for label, p in at_shares.items()},
        planning_seconds=planning,
        floors=floors,
        setter=(f"{floor.phase} of {graph.nodes[floor.node].name}", floor.bytes),
        points=tuple(points),
        lowest=step.lowest() if num_measured else None,
    )


OPTIONS = {"checkmate": {"time_limit": 600.0}}
"""A sweep that its time limit cuts is done anew at every budget."""


def attempt(graph: Graph, budget_bytes: int, planner: str) -> Plan | None:
    """The plan, or None where the planner does not go as low."""
    try:
        return plan(graph, budget_bytes, planner, **OPTIONS.get(planner, {}))
    except InfeasibleBudgetError:
        return None


def floor_of(graph: Graph, planner: str) -> int:
    """The lowest peak that a planner reaches."""
    try:
        plan(graph, -1, planner, **OPTIONS.get(planner, {}))
    except InfeasibleBudgetError as error:
        return error.sufficient_bytes
    raise AssertionError("a negative budget is not feasible")


def summary(comparisons: Sequence[Comparison]) -> str:
    """A Markdown table with one row a network, targets in brackets."""
    lines = [
        "| network | operations | plain peak | lowest peak (target) | recomputed there, and at the target | "
        "lowest of `rematerialize` | at 50 % | at 35 % | lost budgets | worst loss | "
        "next lowest planner | measured within | planning |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for c in comparisons:
        target = NETWORKS[c.name].lowest_reduction
        others = {name: floor for name, floor in c.floors.items() if name != "auto"}
        nearest = min(others, key=lambda name: others[name]) if others else None
        measured = [p for p in c.points if p.measured_bytes is not None]
        within = sum(p.measured_bytes - LOSS_BYTES <= p.budget_bytes for p in measured if p.measured_bytes is not None)
        compared = [p for p in c.points if p.others]
        cells = [
            c.name,
            str(c.num_nodes),
            f"{c.plain_bytes / 2**30:.2f} GiB",
            f"−{1 - c.floors['auto'] / c.plain_bytes:.1%}" + (f" ({target:.0%})" if target else ""),
            f"{c.points[0].overhead / c.forward_share:.0%}"
            + (f", {o / c.forward_share:.0%}" if (o := c.overheads.get("target")) is not None else "")
            + " of a forward",
            "–"
            if c.lowest is None
            else f"−{1 - c.lowest.budget_bytes / c.plain_bytes:.1%}, {c.lowest.forward_share:.0%} of a forward",
            *("–" if (o := c.overheads[label]) is None else f"+{o:.1%}" for label in ("half", "35 %")),
            f"{sum(p.loss > 0 for p in c.points)} of {len(compared)}",
            f"{max(p.loss for p in c.points):.3%}",
            "–" if nearest is None else f"{nearest} −{1 - others[nearest] / c.plain_bytes:.1%}",
            f"{within} of {len(measured)}",
            f"{c.planning_seconds['auto']:.1f} s",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def details(c: Comparison) -> str:
    """A Markdown table with one row a budget."""
    lines = [
        f"### {c.name}",
        "",
        f"No schedule of whole operations gets below {c.setter[1] / 2**30:.3f} GiB: {c.setter[0]}. Plain peak "
        f"{c.plain_bytes / 2**30:.3f} GiB"
        + ("" if c.plain_measured_bytes is None else f", measured {c.plain_measured_bytes / 2**30:.3f} GiB")
        + f"; seconds {c.seconds}. CPU seconds of the first answer, in this order (`auto` has judged some families): "
        + ", ".join(f"{name} {seconds:.1f}" for name, seconds in c.planning_seconds.items())
        + ".",
        "",
        "| budget GiB | of plain | predicted | measured | auto | lower bound | best of the others | loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for p in c.points:
        best = p.best_other
        lines.append(
            f"| {p.budget_bytes / 2**30:.3f} | {p.budget_bytes / c.plain_bytes:.1%} | {p.peak_bytes / 2**30:.3f} | "
            + ("–" if p.measured_bytes is None else f"{p.measured_bytes / 2**30:.3f}")
            + f" | +{p.overhead:.2%} | {p.least_overhead:.2%} | "
            + ("none fits" if best is None else f"+{best[1]:.2%} {best[0]}")
            + f" | {f'{p.loss:.3%}' if p.loss else ''} |"
        )
    return "\n".join(lines)


def write(comparisons: Sequence[Comparison]) -> None:
    """The tables and the points of all networks."""
    text = [
        "# `auto` against every other planner",
        "",
        f"`python recipes/benchmarks/{Path(__file__).name}` prints and writes this. Overheads are fractions of the "
        "plain step; planning is CPU time on one thread; the lower bound is a linear relaxation.",
        "",
        summary(comparisons),
        "",
        *(line for c in comparisons for line in (details(c), "")),
    ]
    (RESULTS / "auto_planner.md").write_text("\n".join(text))
    with (RESULTS / "auto_planner.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["network", "budget_bytes", "peak_bytes", "measured_bytes", "least_overhead", *PLANNERS])
        for c in comparisons:
            for p in c.points:
                overheads = {"auto": p.overhead} | p.others
                row = [c.name, p.budget_bytes, p.peak_bytes, p.measured_bytes, f"{p.least_overhead:.6f}"]
                writer.writerow([*row, *(f"{overheads[n]:.6f}" if n in overheads else "" for n in PLANNERS)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--planners", default=",".join(name for name in PLANNERS if name != "auto"))
    parser.add_argument("--budgets", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="at how many of the budgets a step is measured")
    parser.add_argument("--estimated", action="store_true", help="seconds from operation counts")
    options = parser.parse_args()
    floor_of(Graph.from_json(_TINY), "auto")  # compiles
    rivals = [name for name in options.planners.split(",") if name]
    file = RESULTS / "auto_planner.json"
    for name in options.networks:
        found = compare(
            name,
            rivals,
            num_budgets=options.budgets,
            is_estimated=options.estimated,
            num_measured=options.steps,
        )
        kept = json.loads(file.read_text()) if file.exists() else {}
        kept[name] = asdict(found)
        file.write_text(json.dumps(kept) + "\n")
        print(f"{details(found)}\n\n{summary([found])}\n", flush=True)
    comparisons = [Comparison.from_json(kept[name]) for name in NETWORKS if name in kept]
    write(comparisons)
    print(summary(comparisons))


_TINY = json.dumps(
    {
        "input_bytes": 0,
        "static_bytes": 0,
        "nodes": [
            {
                "name": f"relu{n}",
                "inputs": [n - 1] if n else [],
                "saved": [n],
                "output_bytes": 8,
                "forward_seconds": 1.0,
            }
            for n in range(12)
        ],
    }
)
"""A chain to compile the planners' code with, which is no part of their time."""


if __name__ == "__main__":
    main()
