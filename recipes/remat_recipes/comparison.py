"""Planners side by side on one graph: what each reaches at a budget, how fast, or how low it could go."""

import csv
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from lightning_remat import Graph, InfeasibleBudgetError, Plan, plan
from lightning_remat.budget import format_bytes

UNLIMITED_BYTES = 2**62
COLUMNS = (
    "planner",
    "budget_bytes",
    "peak_bytes",
    "step_seconds",
    "recompute_overhead",
    "num_recomputed",
    "planning_seconds",
    "floor_bytes",
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call of a planner.

    Attributes:
        planner: its name.
        budget_bytes: what it was given; none means no limit.
        plan: the answer, or none where it found no schedule.
        floor_bytes: where it found none, the lowest peak that it can reach.
        node: where it found none, the node that sets this floor, if it is known.
        planning_seconds: how long it took.
    """

    planner: str
    budget_bytes: int | None
    plan: Plan | None
    floor_bytes: int | None
    node: str | None
    planning_seconds: float


def attempt(graph: Graph, planner: str, budget_bytes: int | None) -> Attempt:
    """One plan, or the reason why there is none."""
    start = time.perf_counter()
    try:
        found = plan(graph, UNLIMITED_BYTES if budget_bytes is None else budget_bytes, planner)
    except InfeasibleBudgetError as error:
        return Attempt(planner, budget_bytes, None, error.sufficient_bytes, error.node, time.perf_counter() - start)
    return Attempt(planner, budget_bytes, found, None, None, found.planning_seconds)


def budgets_between(low_bytes: int, high_bytes: int, count: int) -> list[int]:
    """`count` budgets at equal distances, both ends included."""
    if count < 2:
        raise ValueError(f"a curve needs at least 2 budgets, not {count}")
    return [low_bytes + (high_bytes - low_bytes) * step // (count - 1) for step in range(count)]


def trade_off(graph: Graph, planner: str, budgets: Sequence[int], console: Console) -> list[Attempt]:
    """The planner at every budget, from the highest down to its floor, and at the floor."""
    points: list[Attempt] = []
    for budget_bytes in track(sorted(budgets, reverse=True), f"{planner:>16}", console=console, transient=True):
        points.append(attempt(graph, planner, budget_bytes))
        floor_bytes = points[-1].floor_bytes
        if floor_bytes is not None:  # the curve's left end, at which a planner must succeed
            points.append(attempt(graph, planner, floor_bytes))
            break
    return points


def attempts_table(attempts: Sequence[Attempt], title: str) -> Table:
    """One row a planner: true peak, seconds of a step, overhead, planning time; or its floor."""
    table = Table(title=title)
    table.add_column("planner", no_wrap=True)
    for column in ("true peak", "step [s]", "overhead", "run again", "planning [s]"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for each in attempts:
        taken = f"{each.planning_seconds:.2f}"
        if each.plan is None:
            floor = f"floor {format_bytes(each.floor_bytes or 0)}" + (f", set by {each.node}" if each.node else "")
            table.add_row(each.planner, "", "", "", "", taken, floor)
        else:
            found = each.plan
            table.add_row(
                each.planner,
                format_bytes(found.peak_bytes),
                f"{found.simulation.seconds:.4g}",
                f"{found.recompute_overhead:.1%}",
                str(found.num_recomputed),
                taken,
                "fits",
            )
    return table


def write_csv(attempts: Sequence[Attempt], file: Path) -> None:
    """One line an attempt; cells of a plan that was not found are empty."""
    with file.open("w", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(COLUMNS)
        for each in attempts:
            found = each.plan
            cells = (
                ["", "", "", ""]
                if found is None
                else [found.peak_bytes, found.simulation.seconds, found.recompute_overhead, found.num_recomputed]
            )
            budget = "" if each.budget_bytes is None else each.budget_bytes
            floor = "" if each.floor_bytes is None else each.floor_bytes
            writer.writerow([each.planner, budget, *cells, each.planning_seconds, floor])
