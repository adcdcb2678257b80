"""How long the planners think: the seconds that the papers print beside ours, and whether ours are within the limit.

    python recipes/benchmarks/planning_speed.py                  # all
    python recipes/benchmarks/planning_speed.py rotor feng --networks resnet50 densenet201
    python recipes/benchmarks/planning_speed.py --first-calls    # also what compiling the kernels takes, once
    python recipes/benchmarks/planning_speed.py --output recipes/results/planning_speed.md

The printed seconds, with their place in the papers, are in `planning_seconds.csv`. Each method is timed twice: on its
paper's own abstract problem, and as a planner that searches for the true peak. CPU seconds count, of one thread and
with compiled kernels in numba's cache on disk; what the first call ever costs is measured apart, in processes with an
empty cache and with a filled one (`--first-calls`). Exits with an error where a limit is missed. No paper has `auto`:
its rows are the whole trade-off, from which every budget is then looked up.

DenseNet comes twice for feng: torchvision joins the whole list of features before each layer, a mesh whose corners
must all be stored; the version of the paper's time joined the last result and the newest feature, which is a series.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table
from torchvision import models

from benchmarks.paper_scale import NETWORKS, PaperNetwork, images, tokens
from benchmarks.paper_seconds import with_measured_seconds
from lightning_remat import Graph, InfeasibleBudgetError, Node, plan
from lightning_remat.chain import Chain
from lightning_remat.planners import feng, kusumoto, rotor
from lightning_remat.planners._chain.stages import cut_stages, stage_figures, to_chain
from lightning_remat.schedules.storages import merge_views
from remat_recipes.networks.gpt import GPT
from remat_recipes.networks.resnet_preact import cifar_resnet, imagenet_resnet
from remat_recipes.papers.feng2018 import pairwise
from remat_recipes.papers.sheets import Sheet

PUBLISHED = Path(__file__).with_name("planning_seconds.csv")
PREACTIVATED = {"resnet200": imagenet_resnet, "resnet1001": cifar_resnet}
SLOTS = 500


@dataclass(frozen=True, slots=True)
class Published:
    """A row of the csv: what a paper prints."""

    planner: str
    network: str
    place: str
    vertices: str
    seconds: str
    limit_seconds: float | None
    cut_off_percent: str


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one call, and what it found."""

    cpu_seconds: float
    wall_seconds: float
    found: str

    def __str__(self) -> str:
        return f"{self.cpu_seconds:.2f} ({self.wall_seconds:.2f})"


def published(planners: list[str]) -> list[Published]:
    """The rows of the chosen planners."""
    with PUBLISHED.open() as lines:
        return [
            Published(
                row["planner"],
                row["network"],
                f"{row['paper']} {row['place']}".strip(),
                row["vertices"],
                f"{row['relation'].replace('=', '')} {row['seconds']}".strip(),
                float(row["limit_seconds"]) if row["limit_seconds"] else None,
                row["cut_off_percent"],
            )
            for row in csv.DictReader(lines)
            if row["planner"] in planners
        ]


@cache
def graph_of(network: str) -> Graph:
    """Its operations at the paper's batch size where one is set, else at 8 images."""
    if network in NETWORKS:
        return NETWORKS[network].graph()
    if network == "gpt48":
        return PaperNetwork(partial(GPT, num_blocks=48), tokens(1024, 50257), 8, 8).graph()
    make = PREACTIVATED.get(network) or getattr(models, network)
    return PaperNetwork(make, images(224), 8, 8).graph()


def graph_for(planner: str, network: str) -> Graph:
    """The same for one planner: the search of `auto` depends on the seconds, so that it gets measured ones."""
    graph = graph_of(network)
    return with_measured_seconds(network, graph) if planner == "auto" and network in NETWORKS else graph


_unseen = count(1)


def unseen(graph: Graph) -> Graph:
    """The same operations in a graph that no planner remembers: a byte more of parameters."""
    return replace(graph, static_bytes=graph.static_bytes + next(_unseen))


def timed(call: Callable[[], str]) -> Timed:
    cpu, wall = time.process_time(), time.perf_counter()
    found = call()
    return Timed(time.process_time() - cpu, time.perf_counter() - wall, found)


def as_planner(planner: str, graph: Graph) -> Timed:
    """The planner at half of the plain peak, or where it says that it cannot."""
    graph = unseen(graph)
    plain_bytes = plan(graph, 1 << 62, "keep_all").peak_bytes

    def call() -> str:
        try:
            found = plan(graph, plain_bytes // 2, planner)
        except InfeasibleBudgetError as error:
            return f"floor {error.minimum_bytes / plain_bytes:.0%} of plain"
        return f"{found.recompute_overhead:.1%} overhead at 50% of plain"

    return timed(call)


def on_lower_sets(row: Published, graph: Graph) -> Iterator[tuple[str, Timed]]:
    """The dynamic program at the least budget, with the paper's times: 10 for a convolution, 1 for all else."""
    storages = merge_views(graph)
    times = tuple(10.0 if "conv" in graph.nodes[n].kind else 1.0 for n in storages.owners)
    problem = kusumoto.LowerSetProblem(times, storages.sizes, storages.edges)
    family: kusumoto.Family = "all" if row.planner == "kusumoto_exact" else "pruned"
    budget = kusumoto.minimum_budget(problem, family)
    number = len(kusumoto.lower_sets(problem, family))

    def call() -> str:
        overhead, _ = kusumoto.cost(problem, kusumoto.solve(problem, budget, lower_sets=family))
        return f"{number} lower sets, {overhead / sum(times):.0%} overhead at the least budget"

    yield row.network, timed(call)


def on_chain(row: Published, graph: Graph) -> Iterator[tuple[str, Timed]]:
    """The dynamic program with 500 slots at half of what the chain needs to keep all."""
    chain = to_chain(tuple(stage_figures(graph, stage) for stage in cut_stages(graph)))
    yield f"{row.network}, {len(chain.stages)} stages", timed(lambda: solved(chain))
    if row.vertices and len(chain.stages) != (length := int(row.vertices)):
        chain = Chain(chain.input_bytes, chain.stages[:length])
        yield f"its first {length} stages", timed(lambda: solved(chain))


def solved(chain: Chain) -> str:
    keep_all = chain.input_bytes + sum(stage.saved_bytes for stage in chain.stages)
    try:
        rotor.solve(chain, keep_all / 2, slots=SLOTS)
    except InfeasibleBudgetError as error:
        return f"floor {error.minimum_bytes / keep_all:.0%} of all tapes"
    return f"{SLOTS} slots"


def on_vertices(row: Published, graph: Graph) -> Iterator[tuple[str, Timed]]:
    """The solver on storages; its cut-off is equation (1) against the sum of all vertices."""
    costs, edges, _ = feng.storage_problem(graph)
    versions = {row.network: edges}
    if row.network.startswith("densenet"):
        versions[f"{row.network}, joined pairwise"] = pairwise(edges)
    for name, lines in versions.items():

        def call(lines: list[tuple[int, int]] = lines) -> str:
            cut_off = 1 - feng.solve(costs, lines).cost / sum(costs)
            return f"{len(costs)} vertices, cut-off {cut_off:.0%} (paper {row.vertices}, {row.cut_off_percent}%)"

        yield name, timed(call)


ABSTRACT: dict[str, Callable[[Published, Graph], Iterator[tuple[str, Timed]]]] = {
    "kusumoto_exact": on_lower_sets,
    "kusumoto_approx": on_lower_sets,
    "rotor": on_chain,
    "feng": on_vertices,
}
PLANNERS = (*ABSTRACT, "checkmate", "auto")


def small_graph() -> Graph:
    """A few operations, to load the kernels with."""
    relu = {"kind": "relu", "output_bytes": 8, "forward_seconds": 1.0, "backward_seconds": 1.0}
    return Graph(tuple(Node(f"n{i}", inputs=(i - 1,) if i else (), saved=(i,), **relu) for i in range(6)))


FIRST_CALL = """
import time
from lightning_remat import Graph, Node, plan
nodes = tuple(Node(f"n{i}", "relu", (i - 1,) if i else (), (i,), output_bytes=8, forward_seconds=1.0) for i in range(6))
for planner in %r:
    start = time.perf_counter()
    plan(Graph(nodes), 1000, planner)
    print(planner, time.perf_counter() - start)
"""


def first_calls(planners: list[str]) -> dict[str, list[float]]:
    """Seconds of each planner's first call in a process: with an empty cache of kernels, and with a filled one."""
    taken: dict[str, list[float]] = {planner: [] for planner in planners}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            command = [sys.executable, "-c", FIRST_CALL % (tuple(planners),)]
            environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            for line in done.stdout.splitlines():
                planner, seconds = line.split()
                taken[planner].append(float(seconds))
    return taken


def main() -> None:
    """Prints the two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("planners", nargs="*", default=list(PLANNERS), help=f"of {', '.join(PLANNERS)}")
    parser.add_argument("--networks", nargs="+", help="of the csv; all by default")
    parser.add_argument("--first-calls", action="store_true", help="time the compilation of the kernels")
    parser.add_argument("--output", type=Path, help="a Markdown file for the table")
    options = parser.parse_args()
    planners: list[str] = options.planners
    torch.set_num_threads(1)
    if options.first_calls:
        first = Table("planner", "kernels compiled", "from the cache", title="first call in a process [s]")
        for planner, seconds in first_calls(planners).items():
            first.add_row(planner, *(f"{each:.2f}" for each in seconds))
        Console().print(first)
    for planner in planners:  # loads the kernels
        plan(small_graph(), 1000, planner)

    title = "Planning time: CPU seconds (wall), kernels in the cache"
    sheet = Sheet(
        "planning_speed", title, ["planner", "network", "paper's", "where", "alone", "as planner", "limit", "found"]
    )
    missed: list[str] = []
    for row in published(planners):
        if options.networks and row.network not in options.networks:
            continue
        graph = graph_for(row.planner, row.network)
        alone = list(ABSTRACT[row.planner](row, graph)) if row.planner in ABSTRACT else []
        planned = as_planner(row.planner, graph)
        for name, each in alone:
            sheet.rows.append((row.planner, name, row.seconds, row.place, each, None, row.limit_seconds, each.found))
        sheet.rows.append(
            (row.planner, row.network, row.seconds, row.place, None, planned, row.limit_seconds, planned.found)
        )
        taken = max(each.cpu_seconds for each in (planned, *(one for _, one in alone)))
        if row.limit_seconds and taken > row.limit_seconds:
            missed.append(f"{row.planner} on {row.network}: {taken:.2f} s")
    sheet.note = f"Over the limit: {'; '.join(missed)}." if missed else "All within their limits."
    sheet.show()
    if options.output:
        made = f"Made by `python recipes/benchmarks/planning_speed.py`, torch {torch.__version__}, one thread."
        options.output.write_text(f"{sheet.markdown()}\n\n{made}\n")
    if missed:
        raise SystemExit(sheet.note)
    Console().print(sheet.note)


if __name__ == "__main__":
    main()
