"""A picture of a schedule on its network: what each block keeps and recomputes, and when it is resident."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from lightning_remat import Plan
from lightning_remat.reports.blocks import blocks
from lightning_remat.schedules.schedule import Action

GIB, MIB = 2**30, 2**20
RUN_COLORS = ("tab:blue", "#fdae6b", "#e6550d", "#7f2704")
RUN_LABELS = ("kept, or read by no backward", "recomputed once", "twice", "more often")


def plot_schedule(plan: Plan, file: Path, title: str) -> None:
    """Left, the bytes that each block makes, by how often it makes them; right, the share resident over the step."""
    graph = plan.graph
    names, block_of = blocks([node.name for node in graph.nodes])
    made = _bytes_by_runs(plan, block_of, len(names))
    unit, unit_name = (GIB, "GiB") if made.sum() >= GIB else (MIB, "MiB")

    figure = Figure(figsize=(11, 1.6 + 0.24 * len(names)), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1, 2])
    rows = np.arange(len(names)) + 0.5
    start = np.zeros(len(names))
    for runs, color in enumerate(RUN_COLORS):
        left.barh(rows, made[:, runs] / unit, left=start, color=color, height=0.8)
        start += made[:, runs] / unit
    left.set_yticks(rows, names, fontsize=8)
    left.set_xlabel(f"activations that the block makes [{unit_name}]")
    left.margins(y=0)
    left.invert_yaxis()

    ends, shares, again = _residency(plan, block_of, len(names))
    edges = np.concatenate([[0.0], ends])
    right.pcolormesh(edges, np.arange(len(names) + 1), shares, cmap="Blues", vmin=0, vmax=1)
    for block, begin, end in again:
        right.plot([begin, end], [block + 0.5] * 2, color="#e6550d", linewidth=3, solid_capstyle="butt")
    turn = next(place for place, action in enumerate(timed_actions(plan)) if action.kind == "B")
    right.axvline(edges[turn], color="black", linestyle=":", linewidth=1)
    right.text(edges[turn], len(names), "forward | backward ", ha="center", va="bottom", fontsize=8)
    right.set_xlabel("seconds into the step")
    right.set_title("blue: share of the block's activations resident; orange: recomputing", fontsize=9)

    figure.suptitle(f"{title}: {plan.planner}, {plan.recompute_overhead:.1%} recomputation", fontsize=11)
    handles = [
        Patch(color=color, label=label)
        for color, label, total in zip(RUN_COLORS, RUN_LABELS, made.sum(axis=0), strict=True)
        if total
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(file)


def timed_actions(plan: Plan) -> list[Action]:
    """The actions that take time: discards do not."""
    return [action for action in plan.schedule if action.kind in "FB"]


def _bytes_by_runs(plan: Plan, block_of: Sequence[int], num_blocks: int) -> NDArray[np.float64]:
    """Bytes of outputs and tapes, by block and by how often they are recomputed."""
    runs = Counter(action.node for action in plan.schedule if action.kind == "F")
    made = np.zeros((num_blocks, len(RUN_COLORS)))
    for n, node in enumerate(plan.graph.nodes):
        made[block_of[n], min(runs[n], len(RUN_COLORS)) - 1] += node.output_bytes + node.tape_bytes
    return made


def _residency(
    plan: Plan, block_of: Sequence[int], num_blocks: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], list[tuple[int, float, float]]]:
    """End of each timed action, share of a block's bytes resident during it, and recomputations: block, begin, end."""
    graph = plan.graph
    seconds = {"F": "forward_seconds", "B": "backward_seconds"}
    ends = np.array(list(accumulate(getattr(graph.nodes[a.node], seconds[a.kind]) for a in timed_actions(plan))))
    total = np.zeros(num_blocks)
    for n, node in enumerate(graph.nodes):
        total[block_of[n]] += node.output_bytes + node.tape_bytes
    shares = np.zeros((num_blocks, len(ends)))
    resident = np.zeros(num_blocks)
    has_output: set[int] = set()
    has_tape: set[int] = set()
    has_run: set[int] = set()
    again: list[tuple[int, float, float]] = []
    place = 0
    for kind, n in plan.schedule:
        node, block = graph.nodes[n], block_of[n]
        if kind == "F":
            resident[block] += node.output_bytes * (n not in has_output) + node.tape_bytes * (n not in has_tape)
            if n in has_run:
                again.append((block, ends[place - 1], ends[place]))
            has_output.add(n)
            has_tape.add(n)
            has_run.add(n)
        elif kind == "D":
            has_output.remove(n)
            resident[block] -= node.output_bytes
        elif kind == "T":
            has_tape.remove(n)
            resident[block] -= node.tape_bytes
        if kind in "FB":
            shares[:, place] = resident / np.maximum(total, 1)
            place += 1
    return ends, shares, again
