"""Plots of a result: memory over a step, and batch sizes against throughput and peak. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import io
from itertools import accumulate
from pathlib import Path
from typing import Any

from .result import Result

_GIB = 2**30
_MIB = 2**20


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def load_plotting() -> None:
    """Makes matplotlib take the memory that it keeps, so that what is counted as free afterwards stays free."""
    if can_plot():
        figure, axes = _figure()
        axes.set_title("text needs fonts")
        figure.savefig(io.BytesIO())


def plot_timeline(result: Result, path: Path) -> None:
    """Memory over the seconds of one step, plain against planned, with the budget and the phases."""
    figure, axes = _figure()
    planned, plain = result.step.timeline, result.step.plain_timeline
    unit, name = _unit(max(planned.peak_bytes, plain.peak_bytes, result.budget_bytes))
    for timeline, label, color in (
        (plain, "plain", "tab:gray"),
        (planned, f"planned ({result.plan.planner})", "tab:blue"),
    ):
        ends = list(accumulate(timeline.seconds, initial=0.0))
        axes.step(ends[1:], [m / unit for m in timeline.memory_bytes], where="pre", label=label, color=color)
        turn = ends[timeline.num_forward]
        axes.axvline(turn, color=color, linestyle=":", linewidth=1)
        top = max(timeline.memory_bytes) / unit
        axes.annotate("forward | backward", (turn, top), color=color, fontsize=8, ha="center", va="bottom")
    axes.axhline(result.budget_bytes / unit, color="tab:red", linestyle="--", label="budget")
    axes.set_xlabel("seconds into the step (regions)")
    axes.set_ylabel(f"memory [{name}]")
    axes.set_ylim(bottom=0)
    axes.set_title(f"One training step at batch size {result.batch_size}")
    axes.legend(loc="lower center")
    figure.savefig(path)


def plot_candidates(result: Result, path: Path) -> None:
    """Throughput and peak over the batch size, plain and planned."""
    figure, (rate, peak) = _figure(columns=2)
    trials = sorted(result.trials, key=lambda c: c.batch_size)
    unit, name = _unit(max(c.plain_peak_bytes for c in trials))
    lines = [
        (rate, "plain", {c: c.plain_samples_per_second for c in trials if c.plain_peak_bytes <= result.budget_bytes}),
        (rate, "planned", {c: c.samples_per_second for c in trials if c.fits and c.samples_per_second is not None}),
        (peak, "plain", {c: c.plain_peak_bytes / unit for c in trials}),
        (peak, "planned", {c: c.predicted_peak_bytes / unit for c in trials}),
    ]
    for axes, label, heights in lines:
        color = "tab:gray" if label == "plain" else "tab:blue"
        axes.plot([c.batch_size for c in heights], list(heights.values()), "o-", color=color, label=label)
    rate.set_ylabel("samples per second")
    peak.axhline(result.budget_bytes / unit, color="tab:red", linestyle="--", label="budget")
    peak.set_ylabel(f"peak [{name}]")
    for axes in (rate, peak):
        axes.set_xlabel("batch size")
        axes.axvline(result.batch_size, color="tab:green", linestyle=":", label="chosen")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.savefig(path)


def _figure(columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # imported here: the package works without it

    figure: Any = Figure(figsize=(6.5 * columns, 4.2), layout="constrained", dpi=120)
    return figure, figure.subplots(1, columns)


def _unit(most_bytes: int) -> tuple[int, str]:
    return (_GIB, "GiB") if most_bytes >= _GIB else (_MIB, "MiB")
