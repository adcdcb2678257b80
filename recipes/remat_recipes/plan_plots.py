"""The pictures of `plan.py`: overhead against true peak for every planner, and memory over one step."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lightning_remat import Plan
from remat_recipes.comparison import Attempt

GIB, MIB = 2**30, 2**20
MARKERS = "osD^v<>Pp*XhH"


def plot_trade_off(
    curves: Mapping[str, Sequence[Attempt]], plain: Attempt, budget_bytes: int, file: Path, title: str
) -> None:
    """Recomputation overhead over the true peak; a curve ends on the left where its planner finds nothing lower.

    The overhead grows with the square of the height, so that the curves stay apart near the plain step too.
    """
    assert plain.plan is not None
    unit, name = _unit(plain.plan.peak_bytes)
    figure, axes = _figure(width=8.5)
    for number, (planner, attempts) in enumerate(curves.items()):
        plans = sorted({(a.plan.peak_bytes, a.plan.recompute_overhead) for a in attempts if a.plan is not None})
        if plans:
            is_ours = planner == "auto"
            axes.plot(
                [peak / unit for peak, _ in plans],
                [100 * overhead for _, overhead in plans],
                marker=MARKERS[number % len(MARKERS)],
                markersize=4,
                linewidth=2.4 if is_ours else 1.2,
                label=f"{planner}, from {plans[0][0] / unit:.2f} {name}",
                color="black" if is_ours else f"C{number % 10}",
                linestyle="-" if number < 10 else "--",
                zorder=3 if is_ours else 2,
            )
    axes.plot(plain.plan.peak_bytes / unit, 0, "k*", markersize=11, label="plain step")
    axes.axvline(budget_bytes / unit, color="tab:red", linestyle=":", label="budget")
    axes.set_xlim(left=0)
    axes.set_yscale("function", functions=(lambda y: np.sqrt(np.maximum(y, 0)), np.square))
    axes.set_ylim(bottom=0)
    axes.set_yticks([y for y in (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200) if y < axes.get_ylim()[1]])
    axes.grid(alpha=0.25)
    axes.set_xlabel(f"true peak of the training step [{name}]")
    axes.set_ylabel("recomputation [% of the plain step]")
    axes.set_title(title)
    figure.legend(loc="outside right center", fontsize="small")
    figure.savefig(file)


def plot_timelines(attempts: Sequence[Attempt], budget_bytes: int, file: Path, title: str) -> None:
    """Memory over the seconds of one step: the plain step, and the plan that takes the least time."""
    plain, *found = [attempt.plan for attempt in attempts if attempt.plan is not None]
    shown = [(plain, "tab:gray")]
    if found:
        shown.append((min(found, key=lambda plan: (plan.simulation.seconds, plan.peak_bytes)), "tab:blue"))
    unit, name = _unit(plain.peak_bytes)
    figure, axes = _figure(width=7.5)
    for plan, color in shown:
        ends = _ends(plan)
        heights = [count / unit for count in plan.simulation.memory_bytes]
        label = "plain" if plan is plain else f"{plan.planner}, {plan.recompute_overhead:.0%} recomputation"
        axes.plot(ends, heights, color=color, drawstyle="steps-pre", label=label)
        axes.fill_between(ends, heights, step="pre", color=color, alpha=0.15)
        turn = next(place for place, action in enumerate(plan.schedule) if action.kind == "B")
        axes.axvline(ends[turn - 1], color=color, linestyle=":", linewidth=1)
        axes.annotate(
            "forward | backward",
            (ends[turn - 1], 0),
            (0, 3),
            textcoords="offset points",
            color=color,
            ha="center",
            fontsize=8,
        )
    axes.axhline(budget_bytes / unit, color="tab:red", linestyle="--", label="budget")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds into the step")
    axes.set_ylabel(f"memory [{name}]")
    axes.set_title(title)
    axes.legend(loc="upper right", fontsize="small")
    figure.savefig(file)


def _ends(plan: Plan) -> list[float]:
    """Seconds at the end of each action; discards take none."""
    nodes = plan.graph.nodes
    kinds = {"F": "forward_seconds", "B": "backward_seconds"}
    return list(
        accumulate(
            getattr(nodes[action.node], kinds[action.kind]) if action.kind in kinds else 0.0 for action in plan.schedule
        )
    )


def _figure(width: float) -> tuple[Any, Any]:
    figure = Figure(figsize=(width, 4.4), layout="constrained", dpi=120)
    return figure, figure.subplots()


def _unit(most_bytes: int) -> tuple[int, str]:
    return (GIB, "GiB") if most_bytes >= GIB else (MIB, "MiB")
