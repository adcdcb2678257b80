"""The answer as people read it, as machines read it, and as files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..budget import format_bytes
from ..plans.plan import StepPlan
from ..reports.result import Candidate
from .devices import Device
from .network import Network
from .request import Request
from .study import Study

_BAR_WIDTH = 18

_CONTENTS = {
    "activation_bytes": "activations",
    "working_bytes": "gradients of activations, workspaces",
    "model_bytes": "parameters and buffers",
    "gradient_bytes": "gradients of parameters",
    "outside_bytes": "optimizer state, other modules",
    "input_bytes": "the batch",
}


def print_answer(network: Network, request: Request, study: Study, device: Device, console: Console) -> None:
    """Prints the answer: does it fit, what is it made of, how low does it go, which batch size."""
    result = study.result
    is_limited = request.memory is not None or request.device is not None
    console.print(f"[bold]{network.name}[/bold]  batch {_sizes(network, study)}, {_surrounded(network, request)}")
    if is_limited:
        console.print(_verdict(study))
    console.print()
    console.print(_contents(study, network), "")
    console.print(_curve(study, request, result.budget_bytes if is_limited else None), "")
    if study.largest is not None and study.fastest is not None:
        console.print(_candidates(study, request.world_size), "")
    if study.attempts:
        console.print(_attempts(study), "")
    if result.step.num_recomputed:
        console.print(_code(request, study), highlight=False, markup=False, soft_wrap=True)
    console.print(_source(study, device), style="dim", highlight=False, soft_wrap=True)


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
        "gather_bandwidth": request.gather_bandwidth,
        "units": dict(network.units),
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
    if network.is_sharded:
        blocks = " and ".join(f"each of {number} {name}" for name, number in network.units.items())
        parts.append(
            f"a rank of {request.world_size}: fully_shard on {blocks + ', then on ' if blocks else ''}the whole"
        )
    return ", ".join(parts)


def _verdict(study: Study) -> str:
    result = study.result
    budget = format_bytes(result.budget_bytes)
    if study.largest is not None:
        how = "by recomputation" if result.step.num_recomputed else "as it is"
        return f"[bold green]A batch of {study.largest.batch_size} fits into {budget}[/bold green] {how}."
    if not result.step.num_recomputed:
        return f"[bold green]It fits into {budget} as it is[/bold green]: nothing is recomputed."
    plain = format_bytes(result.plain_peak_bytes)
    more = f"{result.recompute_overhead:.1%} more time"
    return f"[bold green]It fits into {budget}[/bold green] for {more}; the plain step needs {plain}."


def _contents(study: Study, network: Network) -> Table:
    result = study.result
    title = f"Plain peak {format_bytes(result.plain_peak_bytes)}, in {study.plain_peak_at}"
    step_bytes = result.step.surroundings.optimizer_step_bytes
    if step_bytes >= result.plain_peak_bytes:
        title = f"Plain peak {format_bytes(result.plain_peak_bytes)}, in the optimizer's step; before it, in "
        title += study.plain_peak_at
    table = _table(title)
    table.show_header = False
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    amounts = asdict(study.contents)
    whole = max(1, sum(amounts.values()))
    for key, words in _CONTENTS.items():
        if not amounts[key]:
            continue
        share = amounts[key] / whole
        if key == "gradient_bytes" and network.is_sharded:
            words = "gathered parameters, gradients"
        if key == "input_bytes" and len(study.result.step.keys) > 1:
            words = "what comes into the parts"
        table.add_row(words, format_bytes(amounts[key]), f"{share:.0%}", "█" * round(share * _BAR_WIDTH))
    table.caption = f"{network.name} has {format_bytes(network.parameter_bytes)} of parameters"
    table.caption_justify = "left"
    return table


def _curve(study: Study, request: Request, budget_bytes: int | None) -> Table:
    plain = study.result.plain_peak_bytes
    saved = 1 - study.lowest_bytes / plain
    title = f"Time over memory: down to {format_bytes(study.lowest_bytes)} (−{saved:.0%})"
    has_gathers = request.gather_bandwidth is not None
    table = _table(title, "peak", "of plain", *["gathered twice"] * has_gathers, "time")
    table.add_column("", no_wrap=True)
    most = max((p.recompute_overhead for p in study.curve), default=0.0) or 1.0
    for point in sorted(study.curve, key=lambda p: -p.peak_bytes):
        bar = "█" * round(point.recompute_overhead / most * _BAR_WIDTH)
        fits = budget_bytes is None or point.peak_bytes <= budget_bytes
        style = None if fits else "dim"
        table.add_row(
            format_bytes(point.peak_bytes),
            f"{point.peak_bytes / plain:.0%}",
            *[f"{point.second_gathers} units"] * has_gathers,
            f"+{point.recompute_overhead:.1%}" if point.recompute_overhead else "plain",
            bar if fits else f"{bar} above the budget".strip(),
            style=style,
        )
    return table


def _candidates(study: Study, world_size: int) -> Table:
    """A few of the batch sizes that were planned: the largest, the fastest, the first that does not fit."""
    assert study.largest is not None
    assert study.fastest is not None
    rate = "samples a second" if world_size == 1 else f"samples a second on {world_size}"
    table = _table("Batch sizes", "batch", "plain peak", "planned peak", "time", rate)
    table.add_column("", justify="left", no_wrap=True)
    for c in _few(study):
        is_largest, is_fastest = c.batch_size == study.largest.batch_size, c.batch_size == study.fastest.batch_size
        words = " and ".join(["largest"] * is_largest + ["fastest"] * is_fastest)
        table.add_row(
            str(c.batch_size),
            format_bytes(c.plain_peak_bytes),
            format_bytes(c.predicted_peak_bytes),
            "" if c.recompute_overhead is None else f"+{c.recompute_overhead:.1%}",
            "" if c.samples_per_second is None else _rate(c.samples_per_second * world_size),
            words if c.fits else c.reason,
            style="bold" if words else (None if c.fits else "dim"),
        )
    return table


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _few(study: Study, most: int = 9) -> list[Candidate]:
    ordered = sorted(study.result.trials, key=lambda c: c.batch_size)
    marked = {c.batch_size for c in (study.largest, study.fastest) if c is not None}
    fitting = [c for c in ordered if c.fits]
    some = fitting[:: max(1, -(-len(fitting) // (most - 3)))]
    refused = [c for c in ordered if not c.fits][:1]
    chosen = marked | {c.batch_size for c in (*some, *refused)}
    return [c for c in ordered if c.batch_size in chosen]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _attempts(study: Study) -> Table:
    table = _table("All planners", "planner", "peak", "time", "planned in")
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
    size = study.result.batch_size if study.largest is not None else '"keep"'
    gathers = "" if request.gather_bandwidth is None else f", gather_bandwidth={request.gather_bandwidth:g}"
    return f"Trainer(callbacks=[Rematerialization(memory_budget={memory}, batch_size={size}{gathers})])"


def _source(study: Study, device: Device) -> str:
    measured = study.result.measured_peak_bytes
    ran = "" if measured is None else f", and the planned step peaked at {format_bytes(measured)} on fake tensors"
    speeds = f"the data sheet of {device.name}"
    if device.is_measured:
        speeds = "the speed of this machine's CPU (--device H100 takes another's)"
    inside = "What a kernel allocates inside itself, fake tensors do not tell."
    return f"Bytes are those of tensors{ran}. {inside} Seconds are estimates from {speeds}."
