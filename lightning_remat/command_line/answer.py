"""The answer as people read it, as machines read it, and as files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..budget import format_bytes
from ..plans.step_planner import StepPlan
from ..reports.report import candidates_table
from .devices import Device
from .network import Network
from .request import Request
from .study import Point, Study

_BAR_WIDTH = 28

_CONTENTS = {
    "activation_bytes": "activations kept for the backward",
    "working_bytes": "at work: gradients of activations, workspaces",
    "model_bytes": "parameters and buffers",
    "gradient_bytes": "gradients of parameters",
    "outside_bytes": "optimizer state and what else lies outside",
    "input_bytes": "the batch",
}


def print_answer(network: Network, request: Request, study: Study, device: Device, console: Console) -> None:
    """Prints the answer: does it fit, what is it made of, how low does it go, which batch size."""
    result, step = study.result, study.result.step
    is_limited = request.memory is not None or request.device is not None
    console.print(f"[bold]{network.name}[/bold]  batch {_sizes(network, study)}, {_surrounded(network, request)}")
    if is_limited:
        console.print(_verdict(study, request))
    console.print()
    console.print(_contents(study, network))
    console.print(_curve(study, result.budget_bytes if is_limited else None))
    if study.largest is not None and study.fastest is not None:
        console.print(candidates_table(_few(study), ""))
        world = request.world_size
        for title, one in (("largest", study.largest), ("fastest", study.fastest)):
            rate = (one.samples_per_second or 0.0) * world
            devices = f" on {world} devices" if world > 1 else ""
            console.print(
                f"[bold]{title} batch: {one.batch_size}[/bold]  {format_bytes(one.predicted_peak_bytes)}, "
                f"+{one.recompute_overhead or 0:.1%} time, about {rate:.3g} samples a second{devices}"
            )
        console.print()
    if study.attempts:
        console.print(_attempts(study))
    if step.num_recomputed:
        console.print(f"in code: {_code(request, study)}", highlight=False, markup=False)
    console.print(f"[dim]bytes: exact, and the planned step ran at {_measured(study)} on fake tensors. "
                  f"{_source(device)}[/dim]", highlight=False)


def answer_as_json(network: Network, request: Request, study: Study, device: Device) -> str:
    """The answer for machines; bytes are integers, seconds estimates."""
    result = study.result
    data: dict[str, Any] = {
        "network": network.name,
        "target": request.target,
        "inputs": list(network.inputs),
        "precision": request.precision,
        "optimizers": list(network.optimizers),
        "strategy": request.strategy,
        "world_size": request.world_size,
        "device": device.name,
        "seconds_are": "estimates from speeds measured here" if device.is_measured else "estimates from a data sheet",
        "parameter_bytes": network.parameter_bytes,
        "buffer_bytes": network.buffer_bytes,
        "plain_peak_contents": asdict(study.contents),
        "plain_peak_at": study.plain_peak_at,
        "lowest_peak_bytes": study.lowest_bytes,
        "curve": [asdict(point) for point in study.curve],
        "largest": None if study.largest is None else asdict(study.largest),
        "fastest": None if study.fastest is None else asdict(study.fastest),
        "compared": [asdict(attempt) for attempt in study.attempts],
        **result.summary(),
    }
    if request.memory is None and request.device is None:
        data["budget_bytes"] = None
    return json.dumps(data, indent=1)


def save_plan(step: StepPlan, path: Path) -> None:
    """Writes what `rematerialize(module, example, plan=Plan.from_json(text))` takes."""
    made = step.plans[step.keys[0]] if len(step.keys) == 1 else step.as_plan(step.plans[step.keys[0]].planner)
    path.write_text(made.to_json())


def _sizes(network: Network, study: Study) -> str:
    first, _, rest = network.inputs[0].partition("×")
    return f"{study.result.batch_size} ({'×'.join(filter(None, ['B' if study.largest else first, rest]))})"


def _surrounded(network: Network, request: Request) -> str:
    parts = [request.precision, " and ".join(network.optimizers) or "no optimizer"]
    if request.strategy == "ddp":
        parts.append(f"ddp on {request.world_size}, its gradient buckets counted on each")
    return ", ".join(parts)


def _verdict(study: Study, request: Request) -> str:
    result = study.result
    budget = format_bytes(result.budget_bytes)
    if result.plain_peak_bytes <= result.budget_bytes:
        return f"[green]It fits into {budget} as it is[/green]: nothing is recomputed."
    if study.largest is not None:
        return f"[green]A batch of {study.largest.batch_size} fits into {budget}[/green] by recomputation."
    overhead = result.recompute_overhead
    plain = format_bytes(result.plain_peak_bytes)
    return f"[green]It fits into {budget}[/green] for {overhead:.1%} more time; the plain step needs {plain}."


def _contents(study: Study, network: Network) -> Table:
    result = study.result
    title = f"Plain peak {format_bytes(result.plain_peak_bytes)}, in {study.plain_peak_at}"
    step_bytes = result.step.surroundings.optimizer_step_bytes
    if step_bytes >= result.plain_peak_bytes:
        title = f"Plain peak {format_bytes(result.plain_peak_bytes)}, in the optimizer's step; before it, in "
        title += study.plain_peak_at
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    amounts = asdict(study.contents)
    whole = max(1, sum(amounts.values()))
    for key, words in _CONTENTS.items():
        share = amounts[key] / whole
        table.add_row(words, format_bytes(amounts[key]), f"{share:.0%}", "█" * round(share * _BAR_WIDTH))
    table.caption = f"{network.name} has {format_bytes(network.parameter_bytes)} of parameters"
    table.caption_justify = "left"
    return table


def _curve(study: Study, budget_bytes: int | None) -> Table:
    plain = study.result.plain_peak_bytes
    saved = 1 - study.lowest_bytes / plain
    title = f"Time over memory: down to {format_bytes(study.lowest_bytes)} (−{saved:.0%})"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    for name in ("peak", "of plain", "time"):
        table.add_column(name, justify="right")
    table.add_column("")
    most = max((p.recompute_overhead for p in study.curve), default=0.0) or 1.0
    for point in sorted(study.curve, key=lambda p: -p.peak_bytes):
        bar = "█" * round(point.recompute_overhead / most * _BAR_WIDTH)
        fits = budget_bytes is None or point.peak_bytes <= budget_bytes
        style = None if fits else "dim"
        table.add_row(
            format_bytes(point.peak_bytes),
            f"{point.peak_bytes / plain:.0%}",
            _time(point),
            bar + ("" if fits else " above the budget"),
            style=style,
        )
    return table


def _time(point: Point) -> str:
    return f"+{point.recompute_overhead:.1%}" if point.recompute_overhead else "plain"


def _few(study: Study, most: int = 9) -> tuple[Any, ...]:
    """The candidates worth a row: the largest, the fastest, the first that does not fit, and some between."""
    ordered = sorted(study.result.trials, key=lambda c: c.batch_size)
    marked = {c.batch_size for c in (study.largest, study.fastest) if c is not None}
    refused = [c for c in ordered if not c.fits][:1]
    fitting = [c for c in ordered if c.fits]
    stride = max(1, -(-len(fitting) // (most - 3)))
    chosen = {c.batch_size for c in (*fitting[::stride], *refused)} | marked
    return tuple(c for c in ordered if c.batch_size in chosen)


def _attempts(study: Study) -> Table:
    table = Table(title="All planners", title_justify="left", box=None, padding=(0, 2))
    for name in ("planner", "peak", "time", "planned in"):
        table.add_column(name, justify="left" if name == "planner" else "right")
    fitting = [a.recompute_overhead for a in study.attempts if a.recompute_overhead is not None]
    best = min(fitting, default=None)
    for attempt in sorted(study.attempts, key=lambda a: (a.recompute_overhead is None, a.recompute_overhead or 0.0)):
        over = attempt.recompute_overhead
        table.add_row(
            attempt.planner,
            format_bytes(attempt.peak_bytes),
            "does not fit" if over is None else f"+{over:.1%}",
            f"{attempt.planning_seconds:.1f} s",
            style="bold" if over is not None and over == best else ("dim" if over is None else None),
        )
    return table


def _code(request: Request, study: Study) -> str:
    memory = f'"{request.memory}"' if isinstance(request.memory, str) else study.result.budget_bytes
    size = study.result.batch_size if study.largest is not None else "keep"
    batch = f'"{size}"' if isinstance(size, str) else size
    return f"Trainer(callbacks=[Rematerialization(memory_budget={memory}, batch_size={batch})])"


def _measured(study: Study) -> str:
    measured = study.result.measured_peak_bytes
    return "an unknown peak" if measured is None else format_bytes(measured)


def _source(device: Device) -> str:
    if device.is_measured:
        return "seconds: estimated from the speed of this machine's CPU; --device H100 estimates another's"
    return f"seconds: estimated from the data sheet of {device.name}"
