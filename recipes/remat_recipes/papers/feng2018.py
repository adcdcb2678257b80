"""Tables 1 and 2 of Feng & Huang 2018: memory and time of Re-forwarding, and what its solver takes.

    python recipes/bench.py paper=feng2018
    python -c "from remat_recipes.papers.feng2018 import main; main('results')"  # without Hydra, in recipes/

Table 1 is memory that grows with the batch: the paper measures two batch sizes and takes the difference, here
parameters and their gradients are left out. Its CustomNet is drawn but not defined, and is left out as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import nn
from torchvision import models

from benchmarks.paper_scale import PaperNetwork, images
from lightning_remat import Graph, Plan, Schedule
from lightning_remat.lowering import lower_kept
from lightning_remat.planners.chen import search
from lightning_remat.planners.feng import Reforwarding, solve, storage_problem
from lightning_remat.schedules.edges import articulation_points
from lightning_remat.schedules.storages import merge_views, nodes_of
from remat_recipes.papers.fake_network import lowest, planned, replayed, without_parameters
from remat_recipes.papers.published import printed
from remat_recipes.papers.sheets import Sheet, publish

PAPER = "feng2018"
RE_FORWARDING = "Re-forwarding"
METHODS = ("Regular", "Chen", RE_FORWARDING)
OPTIONS: dict[str, dict[str, Any]] = {"Inception v3": {"init_weights": False, "aux_logits": False}}
MIB = 2**20


def main(
    folder: str | Path, networks: Sequence[str] | None = None, *, scale: float = 1.0, effort: float = 0.25
) -> None:
    """Writes tables and plots into `folder`.

    Args:
        folder: Made if it is not there.
        networks: Which of the paper's, as it names them; None for all of Table 1.
        scale: Part of the paper's batch size in Table 1; 1 for its own.
        effort: Of `auto`, as a multiple of its usual search.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    about = {network: f for (network, _), f in printed(PAPER, "Table 1", "memory").items() if network != "CustomNet"}
    table1 = Sheet("table1", TITLE_OF_TABLE1, columns_of_table1(), note=NOTE_OF_TABLE1)
    table2 = Sheet("table2", "Table 2: the solver and its own count of memory", COLUMNS_OF_TABLE2, note=NOTE_OF_TABLE2)
    solve([1, 1, 1], [(0, 1), (1, 2)])  # compiles the kernel
    for name in networks or list(about):
        batch_size, size = max(1, round(int(about[name].batch_size) * scale)), int(about[name].input.split("x")[-1])
        graph = without_parameters(PaperNetwork(partial(build, name), images(size), batch_size, 1).graph())
        table2.rows += solver_rows(name, graph)
        table1.rows.append(memory_row(name, graph, effort))
        print(*table1.rows[-1], flush=True)
        draw(table1, folder / "table1.png")
        publish(folder, "Feng & Huang 2018, Tables 1 and 2", introduction(effort), [table1, table2], ["table1.png"])
    table1.show()
    table2.show()


def introduction(effort: float) -> str:
    """How the figures came about."""
    return (
        "`python recipes/bench.py paper=feng2018`. Cells are printed → ours at the paper's batch size and input; MB "
        "are 2^20 bytes, by which the plain steps agree. Ours are the simulator's peaks on profiles of fake tensors "
        "without parameters and their gradients, as the paper takes them out by a difference of two batch sizes; "
        "CustomNet, which the paper draws but does not define, is left out. Seconds are estimated from "
        f"operation counts; `auto` searches with effort {effort:g}. Made with"
    )


def build(name: str) -> nn.Module:
    """The network that the paper names so."""
    return getattr(models, name.lower().replace(" ", "_"))(**OPTIONS.get(name, {}))


def columns_of_table1() -> list[str]:
    """Headings of Table 1."""
    columns = ["network", "batch", *(f"{method} MB" for method in METHODS), "auto MB"]
    columns += ["cut-off %", "auto's cut-off %", "recomputation %", "auto's %", "auto's % at Re-forwarding's peak"]
    return columns


def memory_row(name: str, graph: Graph, effort: float) -> list[object]:
    """One network: plain, Chen's and Re-forwarding at their lowest, `auto` at its lowest and at Re-forwarding's."""
    memory, overhead = printed(PAPER, "Table 1", "memory"), printed(PAPER, "Table 1", "time overhead")
    reduction = printed(PAPER, "Table 1", "memory reduction")
    made = {
        "Regular": replayed(graph, lower_kept(graph, range(len(graph.nodes)))),
        "Chen": lowest_of(graph, chen_schedules(graph)),
        RE_FORWARDING: lowest_of(graph, reforwarding_schedules(graph)),
        "auto": lowest(graph, "auto", effort),
    }
    regular = made["Regular"].peak_bytes
    row: list[object] = [name, memory[name, "Regular"].batch_size]
    row += [f"{memory[name, method].value} → {made[method].peak_bytes / MIB:.0f}" for method in METHODS]
    row.append(f"{made['auto'].peak_bytes / MIB:.0f}")
    ours, best = (100 * (1 - made[method].peak_bytes / regular) for method in (RE_FORWARDING, "auto"))
    row += [f"{reduction[name, RE_FORWARDING].value} → {ours:.0f}", f"{best:.0f}"]
    row.append(f"{overhead[name, RE_FORWARDING].value} → {100 * made[RE_FORWARDING].recompute_overhead:.0f}")
    row.append(f"{100 * made['auto'].recompute_overhead:.0f}")
    row.append(f"{100 * planned(graph, made[RE_FORWARDING].peak_bytes, 'auto', effort).recompute_overhead:.1f}")
    return row


def lowest_of(graph: Graph, schedules: Iterator[Schedule]) -> Plan:
    """The plan of the lowest peak."""
    return min((replayed(graph, schedule) for schedule in schedules), key=lambda made: made.peak_bytes)


def chen_schedules(graph: Graph) -> Iterator[Schedule]:
    """The paper's re-organized Chen: Algorithm 3 between splitting vertices, its last segment kept and not."""
    storages = merge_views(graph)
    for found in search(storages.sizes, articulation_points(len(storages.owners), storages.edges)):
        kept = {v for v, is_dropped in enumerate(found.m) if not is_dropped}
        last = set(range(max(kept, default=-1) + 1, len(found.m)))
        yield lower_kept(graph, nodes_of(storages, kept))
        yield lower_kept(graph, nodes_of(storages, kept | last))


def reforwarding_schedules(graph: Graph) -> Iterator[Schedule]:
    """The optimum of equation (1), its last segment kept and not."""
    costs, edges, vertices = storage_problem(graph)
    solution = solve(costs, edges)
    inside = range(1, len(costs) - 1)
    stored = {vertices[v - 1] for v in solution.stored if v in inside}
    yield lower_kept(graph, stored)
    if solution.segments:
        yield lower_kept(graph, stored | {vertices[v - 1] for v in max(solution.segments, key=max)})


TITLE_OF_TABLE1 = "Table 1: memory that grows with the batch, and time"
NOTE_OF_TABLE1 = (
    "Where ours is higher, on VGG: the lowest peak of any schedule here is the backward of the second convolution with "
    "its in-place ReLU, one operation of our graph, which holds its input, its output and the gradients on both sides, "
    "784 MB each at batch 64, and the images. The paper's 2586 MB are room for three of these four."
)
COLUMNS_OF_TABLE2 = ["network", "vertices", "solver s", "theoretical cut-off %", "simulated cut-off %"]
NOTE_OF_TABLE2 = (
    "The theoretical cut-off is equation (1) against the sum of all vertices; the simulated one has gradients and "
    "workspaces too. Vertices are fewer here where an operation works in place. DenseNet comes twice: torchvision "
    "joins the whole list of features before each layer, a mesh whose corners must all be stored; the version of the "
    "paper's time joined the last result and the newest feature, which is a series."
)


def solver_rows(name: str, graph: Graph) -> Iterator[list[object]]:
    """Vertices, seconds and equation (1): as printed and ours."""
    counts = printed(PAPER, "Table 2", "vertices")
    seconds = printed(PAPER, "Table 2", "planning seconds")
    theory = printed(PAPER, "Table 2", "theoretical memory reduction")
    measured = printed(PAPER, "Table 2", "measured memory reduction")
    costs, edges, _ = storage_problem(graph)
    made = lowest_of(graph, reforwarding_schedules(graph))
    reached = made.peak_bytes / made.plain.peak_bytes
    versions = {name: edges}
    if name.startswith("DenseNet"):
        versions[f"{name}, pairwise"] = pairwise(edges)
    for version, lines in versions.items():
        start = time.process_time()
        found: Reforwarding = solve(costs, lines)
        taken = time.process_time() - start
        yield [
            version,
            f"{counts[name, ''].value} → {len(costs)}",
            f"{seconds[name, RE_FORWARDING].value} → {taken:.2f}",
            f"{theory[name, RE_FORWARDING].value} → {100 * (1 - found.cost / sum(costs)):.0f}",
            f"{measured[name, RE_FORWARDING].value} → {100 * (1 - reached):.0f}" if lines is edges else None,
        ]


def pairwise(edges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The edges with each concatenation that extends an earlier one by one vertex reading that one and the vertex."""
    inputs: dict[int, frozenset[int]] = {}
    for a, b in edges:
        inputs[b] = inputs.get(b, frozenset()) | {a}
    made: dict[frozenset[int], int] = {}
    found: list[tuple[int, int]] = []
    for v in sorted(inputs):
        newest = max(inputs[v])
        earlier = made.get(inputs[v] - {newest})
        made[inputs[v]] = v
        found += [(a, v) for a in (inputs[v] if earlier is None else (earlier, newest))]
    return found


def draw(table: Sheet, file: Path) -> None:
    """Cut-off by network: as printed, by the same method, and by `auto`."""
    names = [str(row[0]) for row in table.rows]
    cuts = [str(row[table.columns.index("cut-off %")]).split(" → ") for row in table.rows]
    best = [float(str(row[table.columns.index("auto's cut-off %")])) for row in table.rows]
    figure = Figure(figsize=(10, 4.2), layout="constrained", dpi=120)
    axes: Any = figure.subplots()
    for number, (label, values) in enumerate(
        {
            "Re-forwarding, as printed": [float(cut[0]) for cut in cuts],
            "Re-forwarding, ours": [float(cut[1]) for cut in cuts],
            "auto": best,
        }.items()
    ):
        places = [k + 0.27 * (number - 1) for k in range(len(names))]
        axes.bar(places, values, width=0.25, label=label, color=("lightgray", "tab:blue", "tab:orange")[number])
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
    axes.set_ylim(0, 100)
    axes.set_ylabel("less memory than the plain step [%]")
    axes.set_title("Feng & Huang 2018, Table 1: cut-off of memory that grows with the batch, at the lowest peak")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper left", fontsize="small")
    figure.savefig(file)
