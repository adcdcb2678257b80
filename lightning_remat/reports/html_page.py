"""`remat_report.html`: the whole result as one page that needs nothing from elsewhere."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from ..budget import format_bytes
from ..plans.plan import StepPlan
from .block_shares import block_shares, prices
from .blocks import blocks
from .residency import StepView, plain_step, view_step
from .result import Result


def write_page(result: Result, path: Path, *, title: str = "", run: Mapping[str, float | None] | None = None) -> Path:
    """Writes the page.

    Args:
        result: What was found.
        path: The file.
        title: What was trained or planned.
        run: What was measured during a run: `peak_bytes`, `step_seconds`, `samples_per_second`.

    Returns:
        The file.
    """
    path.write_text(page(result, title=title, run=run), encoding="utf-8")
    return path


def page(result: Result, *, title: str = "", run: Mapping[str, float | None] | None = None) -> str:
    """The page as text."""
    parts = resources.files(__package__ or "") / "page"
    # In a script, "</" would end the script.
    data = json.dumps(page_data(result, run or {}), separators=(",", ":")).replace("</", "<\\/")
    text = (parts / "page.html").read_text(encoding="utf-8")
    for name, content in {
        "title": html.escape(title or "Rematerialization"),
        "headline": html.escape(headline(result)),
        "style": (parts / "page.css").read_text(encoding="utf-8"),
        "data": data,
        "script": (parts / "page.js").read_text(encoding="utf-8"),
    }.items():
        text = text.replace(f"<!-- {name} -->", content)
    return text


def headline(result: Result) -> str:
    """The result in a sentence."""
    plain, planned = result.plain_peak_bytes, result.measured_peak_bytes or result.predicted_peak_bytes
    if not result.step.num_recomputed:
        return f"A training step of {result.batch_size} samples fits as it is, in {format_bytes(plain)}."
    return (
        f"A training step of {result.batch_size} samples in {format_bytes(planned)} instead of {format_bytes(plain)} "
        f"(−{1 - planned / plain:.0%}), for {result.recompute_overhead:.1%} more time, with the same gradients."
    )


def page_data(result: Result, run: Mapping[str, float | None]) -> dict[str, Any]:
    """All that the page draws."""
    step = result.step
    planned, plain = view_step(step), plain_step(step)
    shares = block_shares(planned.plan)
    return {
        "batchSize": result.batch_size,
        "budget": result.budget_bytes,
        "planner": result.plan.planner,
        "overhead": result.recompute_overhead,
        "numRecomputed": step.num_recomputed,
        "plainPeak": result.plain_peak_bytes,
        "predictedPeak": result.predicted_peak_bytes,
        "measuredPeak": result.measured_peak_bytes,
        "choice": result.choice,
        "reasons": [reason for made in step.plans.values() for reason in made.reasons],
        "run": dict(run),
        "views": {"planned": _view(step, planned), "plain": _view(plain, view_step(plain))},
        "shares": [asdict(share) for share in shares],
        "prices": prices(shares),
        "candidates": [asdict(c) for c in sorted(result.trials, key=lambda c: c.batch_size)],
    }


def _view(step: StepPlan, view: StepView) -> dict[str, Any]:
    """A step as numbers; an action is its kind (`R` for a recomputation) and its node."""
    graph, actions = view.plan.graph, view.plan.schedule.actions
    names, block_of = blocks([node.name for node in graph.nodes])
    ran: set[int] = set()
    kinds: list[str] = []
    for kind, n in actions:
        kinds.append("R" if kind == "F" and n in ran else kind)
        ran.add(n)
    around = step.surroundings
    return {
        "ends": [float(f"{end:.6g}") for end in view.ends],
        "memory": view.timeline.memory_bytes,
        "turn": view.timeline.num_forward,
        "optimizerStep": view.timeline.optimizer_step_bytes,
        "kinds": "".join(kinds),
        "nodes": [n for _, n in actions],
        "names": [node.name for node in graph.nodes],
        "blocks": names,
        "blockOf": block_of,
        "stays": [(s.node, int(s.is_tape), s.num_bytes, s.start, s.end) for s in view.stays],
        "fixed": {
            "model": sum(made.graph.static_bytes for made in step.plans.values()),
            "outside": around.resident_bytes + around.correction_bytes,
            "inputs": graph.input_bytes,
        },
        "gradients": view.timeline.gradient_bytes,
        "handedOn": view.timeline.handed_on_bytes,
    }
