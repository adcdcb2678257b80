"""`auto` against every other planner over 20 budgets: seconds, floors, planning time.

python recipes/benchmarks/auto_planner.py resnet50 unet --planners periodic,rotor --budgets 20
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.paper_scale import NETWORKS
from lightning_remat import PLANNERS, Graph, InfeasibleBudgetError, Plan, plan, simulate
from lightning_remat.lowering import lower_kept


@dataclass(frozen=True, slots=True)
class Point:
    """One budget: what `auto` found there and the best of the others.

    Attributes:
        budget_bytes: The true peak allowed.
        ours: Recomputation of `auto` as a fraction of the plain step.
        theirs: The least of the others, or None where none of them fits.
        rival: Which one that is.
    """

    budget_bytes: int
    ours: float
    theirs: float | None
    rival: str

    @property
    def is_lost(self) -> bool:
        """Whether another planner is faster."""
        return self.theirs is not None and self.theirs < self.ours - 1e-9


@dataclass(frozen=True, slots=True)
class Comparison:
    """One network: its points and what each planner's floor and time were."""

    name: str
    graph: Graph
    plain_bytes: int
    planning_seconds: float
    points: tuple[Point, ...]
    floors: dict[str, int]
    rival_seconds: dict[str, float]

    @property
    def minimum_bytes(self) -> int:
        """The lowest peak of `auto`."""
        return self.points[0].budget_bytes

    def overhead_at(self, fraction: float) -> float | None:
        """Overhead of `auto` at a fraction of the plain peak, or None below its floor."""
        budget_bytes = int(self.plain_bytes * fraction)
        return None if budget_bytes < self.minimum_bytes else plan(self.graph, budget_bytes).recompute_overhead


def compare(name: str, graph: Graph, rivals: Sequence[str], num_budgets: int = 20) -> Comparison:
    """`auto` and the rivals at budgets from the floor of `auto` to the plain peak, both included."""
    start = time.perf_counter()
    minimum = floor_of(graph, "auto")
    planning_seconds = time.perf_counter() - start
    plain = simulate(graph, lower_kept(graph, range(len(graph.nodes)))).peak_bytes
    budgets = [minimum + (plain - minimum) * k // (num_budgets - 1) for k in range(num_budgets)]
    best: dict[int, tuple[float, str]] = {}
    floors = {"auto": minimum}
    rival_seconds: dict[str, float] = {}
    for rival in rivals:
        start = time.perf_counter()
        for budget in reversed(budgets):
            found = attempt(graph, budget, rival)
            if isinstance(found, int):
                floors[rival] = found
                break
            floors[rival] = found.peak_bytes
            if budget not in best or found.simulation.seconds < best[budget][0]:
                best[budget] = (found.simulation.seconds, rival)
        rival_seconds[rival] = time.perf_counter() - start
    points: list[Point] = []
    for budget in budgets:
        ours = plan(graph, budget)
        theirs = best.get(budget)
        step = ours.plain.seconds
        points.append(
            Point(
                budget,
                ours.recompute_overhead,
                None if theirs is None else (theirs[0] - step) / step,
                "" if theirs is None else theirs[1],
            )
        )
    return Comparison(name, graph, plain, planning_seconds, tuple(points), floors, rival_seconds)


def attempt(graph: Graph, budget_bytes: int, planner: str) -> Plan | int:
    """The plan, or the lowest peak that the planner reaches."""
    try:
        return plan(graph, budget_bytes, planner)
    except InfeasibleBudgetError as error:
        return int(error.minimum_bytes)


def floor_of(graph: Graph, planner: str) -> int:
    """The lowest peak that a planner reaches."""
    found = attempt(graph, -1, planner)
    assert isinstance(found, int), "a negative budget is not feasible"
    return found


def summary(comparisons: Sequence[Comparison]) -> Table:
    """One row a network, with the targets beside what was reached."""
    table = Table("network", "nodes", "plain GiB", "lowest (target)", "recomputed there", title="auto")
    for heading in ("50 % peak", "35 % peak", "lost of 20", "next floor", "planning s"):
        table.add_column(heading)
    for c in comparisons:
        target = NETWORKS[c.name].lowest_reduction if c.name in NETWORKS else None
        forward = sum(node.forward_seconds for node in c.graph.nodes)
        step = forward + sum(node.backward_seconds for node in c.graph.nodes)
        allowed = c.minimum_bytes if target is None else max(c.minimum_bytes, int((1 - target) * c.plain_bytes))
        at_target = plan(c.graph, allowed).simulation.recompute_seconds / forward
        others = [bytes for name, bytes in c.floors.items() if name != "auto"]
        table.add_row(
            c.name,
            str(len(c.graph.nodes)),
            f"{c.plain_bytes / 2**30:.2f}",
            f"-{1 - c.minimum_bytes / c.plain_bytes:.1%}" + (f" ({target:.0%})" if target else ""),
            f"{c.points[0].ours * step / forward:.0%} of forward, {at_target:.0%} at the target",
            *(("–" if (o := c.overhead_at(f)) is None else f"{o:+.1%}") for f in (0.5, 0.35)),
            str(sum(p.is_lost for p in c.points)),
            f"-{1 - min(others) / c.plain_bytes:.1%}" if others else "–",
            f"{c.planning_seconds:.1f}",
        )
    return table


def details(comparison: Comparison) -> Table:
    """One row a budget."""
    table = Table("budget GiB", "auto", "best of the others", "which", title=comparison.name)
    for p in comparison.points:
        theirs = "–" if p.theirs is None else f"{p.theirs:+.2%}"
        table.add_row(
            f"{p.budget_bytes / 2**30:.2f}", f"{p.ours:+.2%}", theirs, p.rival, style="red" if p.is_lost else ""
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--planners", default=",".join(name for name in PLANNERS if name != "auto"))
    parser.add_argument("--budgets", type=int, default=20)
    parser.add_argument("--measured", action="store_true", help="measure seconds on the CPU at a small batch")
    parser.add_argument("--details", action="store_true")
    options = parser.parse_args()
    console = Console(width=160)
    comparisons: list[Comparison] = []
    for name in options.networks:
        network = NETWORKS[name]
        graph = network.measured_graph() if options.measured else network.graph()
        comparisons.append(compare(name, graph, [p for p in options.planners.split(",") if p], options.budgets))
        if options.details:
            console.print(details(comparisons[-1]))
        console.print(summary(comparisons[-1:]))
    if len(comparisons) > 1:
        console.print(summary(comparisons))


if __name__ == "__main__":
    main()
