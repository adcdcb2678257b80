"""What people read: a table at the start of a run, and a report file at its end."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..budget import format_bytes
from ..measure.step_clock import Reading
from ..plans.plan import Plan
from ..schedules.stored import write_whole
from .html_page import headline, write_page
from .plots import can_plot, plot_candidates, plot_timeline
from .result import Candidate, Result


def result_table(result: Result) -> Table:
    """The table printed at the start: peaks, budget, overhead, what is kept and what is recomputed."""
    title = f"Rematerialization: planner {result.plan.planner}, batch size {result.batch_size}"
    table = Table(title=title, caption=headline(result))
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("plain peak (predicted)", format_bytes(result.plain_peak_bytes))
    table.add_row("budget", format_bytes(result.budget_bytes))
    table.add_row("predicted peak", format_bytes(result.predicted_peak_bytes))
    measured = result.measured_peak_bytes
    table.add_row("measured peak", "not measured again (resumed)" if measured is None else format_bytes(measured))
    if result.reserved_bytes is not None:
        table.add_row("reserved by the allocator (predicted)", format_bytes(result.reserved_bytes))
    if result.prediction_error is not None:
        table.add_row("prediction error", f"{result.prediction_error:+.2%}")
    table.add_row("recompute overhead", f"{result.recompute_overhead:.1%}")
    for name, plan in result.step.plans.items():
        kept, recomputed = kept_and_recomputed(plan)
        table.add_section()
        table.add_row("region", name or "the LightningModule's own forward")
        table.add_row("kept", _kinds(plan, kept))
        table.add_row("recomputed", _kinds(plan, recomputed))
    return table


def candidates_table(candidates: tuple[Candidate, ...], choice: str) -> Table:
    """The batch sizes that were planned, and why one was chosen."""
    table = Table(title="Batch sizes", caption=choice)
    for column in ("batch", "plain peak", "planned peak", "measured peak", "overhead", "samples/s", "fits"):
        table.add_column(column, justify="right")
    for c in sorted(candidates, key=lambda c: c.batch_size):
        table.add_row(
            str(c.batch_size),
            format_bytes(c.plain_peak_bytes),
            format_bytes(c.predicted_peak_bytes),
            "" if c.measured_peak_bytes is None else format_bytes(c.measured_peak_bytes),
            "" if c.recompute_overhead is None else f"{c.recompute_overhead:.1%}",
            "" if c.samples_per_second is None else f"{c.samples_per_second:.4g}",
            "yes" if c.fits else c.reason or "no",
        )
    return table


def kept_and_recomputed(plan: Plan) -> tuple[list[int], list[int]]:
    """The nodes that hold memory and run once, and the nodes that run again."""
    runs = plan.schedule.runs()
    recomputed = [n for n, count in sorted(runs.items()) if count > 1]
    kept = [
        n
        for n, count in sorted(runs.items())
        if count == 1 and (plan.graph.nodes[n].output_bytes or plan.graph.nodes[n].tape_bytes)
    ]
    return kept, recomputed


def _kinds(plan: Plan, nodes: list[int]) -> str:
    """Such as `53 × conv2d, 16 × relu`, the most frequent first."""
    counts = Counter(plan.graph.nodes[n].kind or plan.graph.nodes[n].name for n in nodes)
    return (
        ", ".join(f"{count} × {kind}" for kind, count in counts.most_common(6))
        + (f" and {sum(counts.values()) - sum(c for _, c in counts.most_common(6))} more" if len(counts) > 6 else "")
        or "nothing"
    )


def format_table(table: Table, *, width: int = 110) -> str:
    """The table as text."""
    console = Console(width=width, no_color=True)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def print_tables(result: Result) -> None:
    """Prints the tables of a result to the terminal."""
    console = Console()
    if len(result.trials) > 1:
        console.print(candidates_table(result.trials, result.choice))
    console.print(result_table(result))


def out_of_memory_note(result: Result) -> str:
    """What to know and to do when a training step ran out of memory despite the plan."""
    step = result.step
    return (
        f"The step was planned for batch size {result.batch_size}.\n{format_table(result_table(result))}"
        "A step that needs more than that had other inputs than the first batch (a longer sequence, a bigger image) or "
        "less memory left on the device. Remedies:\n"
        f"1. Rematerialization(memory_budget={int(result.budget_bytes * 0.85)}) plans for less"
        f" (the lowest that was planned for so far is {format_bytes(step.predicted_peak_bytes)});\n"
        f"2. Rematerialization(batch_size={max(1, result.batch_size // 2)}), with effective_batch_size to keep the "
        "samples an optimizer step;\n"
        "3. bound what varies (crop, pad or bucket), so that no batch is larger than the first."
    )


def write_report(result: Result, folder: Path, readings: Sequence[Reading] = (), *, title: str = "") -> Path:
    """Writes `remat_report.json`, and `remat_report.html` beside it for people, into the folder.

    Args:
        result: What was found.
        folder: Made if it does not exist.
        readings: What was measured during the run.
        title: What was trained.

    Returns:
        The JSON file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, run = folder / "remat_report.json", _run_figures(readings)
    data = {**json.loads(result.to_json()), "run": run}
    write_whole(path, json.dumps(data, indent=1))
    write_page(result, folder / "remat_report.html", title=title, run=run)
    return path


def draw_plots(result: Result, folder: Path) -> None:
    """Draws memory over the step, and the batch sizes if there were several, if matplotlib is installed."""
    if can_plot():
        folder.mkdir(parents=True, exist_ok=True)
        plot_timeline(result, folder / "remat_timeline.png")
        if len(result.trials) > 1:
            plot_candidates(result, folder / "remat_batch_sizes.png")


def _run_figures(readings: Sequence[Reading]) -> dict[str, float | None]:
    """The run in three figures; rates are medians over the log intervals."""
    if not readings:
        return {}
    peaks = [r.peak_bytes for r in readings if r.peak_bytes is not None]
    return {
        "peak_bytes": max(peaks, default=None),
        "step_seconds": statistics.median(r.step_seconds for r in readings),
        "samples_per_second": statistics.median(r.samples_per_second for r in readings),
    }
