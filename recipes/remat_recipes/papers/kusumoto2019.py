"""Tables 1 and 2 of Kusumoto et al. 2019: what seven networks take by its methods, Chen's, plain, and `auto`.

    python recipes/bench.py paper=kusumoto2019
    python -c "from remat_recipes.papers.kusumoto2019 import main; main('results')"  # without Hydra, in recipes/

The paper's protocol: a convolution takes ten units of time and everything else one; the budget of its model is the
least for which a sequence of lower sets exists; the true peak of that strategy, parameters included, is what counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.paper_scale import NETWORKS, PaperNetwork
from lightning_remat import Graph, Plan
from lightning_remat.planners._lower_sets.canonical import lower_sequence
from lightning_remat.planners.chen import search
from lightning_remat.planners.kusumoto import LowerSetProblem, minimum_budget, solve
from lightning_remat.schedules.edges import articulation_points
from lightning_remat.schedules.storages import StorageGraph, merge_views
from remat_recipes.papers.fake_network import HOW_SECONDS, FakeNetwork, lowest, planned, replayed
from remat_recipes.papers.published import printed
from remat_recipes.papers.sheets import Sheet, publish

PAPER = "kusumoto2019"
NAMES = {
    "PSPNet": "pspnet",
    "U-Net": "unet",
    "ResNet50": "resnet50",
    "ResNet152": "resnet152",
    "VGG19": "vgg19",
    "DenseNet161": "densenet161",
    "GoogLeNet": "googlenet",
}
FAMILIES = {"ApproxDP": "pruned", "ExactDP": "all"}
OBJECTIVES = {"MC": "memory", "TC": "time"}
NOTES = {
    "Table 1": (
        "Where reductions differ much, the plain steps do. torchvision's GoogLeNet normalizes after each of its 57 "
        "convolutions, that of the paper's 134 vertices does not: here the plain step keeps much more, and more can be "
        "dropped. In VGG19 the lowest peaks are the same in GB, 4.5: no schedule goes below the backward of its second "
        "convolution, whose input, output and both gradients take 0.82 GB each, with the parameters and their "
        "gradients; but the plain step takes 6.1 GB here for 7.0 in Chainer. Chen's method finds no splitting point "
        "inside torchvision's dense blocks, each layer of which reads all features before it. Fewer vertices: an "
        "in-place ReLU and the operation that it overwrites are one."
    ),
    "Table 2": (
        "Without liveness ours are lower than printed: there the gradients of a part stay until its backward ends "
        "(equation 2 counts the part twice), here they are autograd's, which frees each after its use; only outputs "
        "and tapes wait for the end of their part."
    ),
}
METERED = ("Vanilla", "ApproxDP+MC", "Chen", "auto")  # with liveness; the others would say the same
RESOLUTION = 3072  # equation (2) counts memory in this part of the sum of all; the true peak is the simulator's
GB = 1e9


@dataclass(frozen=True, slots=True)
class Outcome:
    """One method on one network.

    Attributes:
        network: As the paper names it.
        method: As the paper names it, or `auto`.
        liveness: Whether values go after their last use; if not, with their part.
        made: The plan, at the peak that the simulator finds.
        metered_bytes: The peak of the real step on fake tensors; None where it was not run.
    """

    network: str
    method: str
    liveness: bool
    made: Plan
    metered_bytes: int | None

    @property
    def reduction(self) -> float:
        """By how many percent the peak lies under the plain one."""
        return 100 * (1 - self.made.peak_bytes / self.made.plain.peak_bytes)


def main(
    folder: str | Path,
    networks: Sequence[str] | None = None,
    *,
    measured: bool = False,
    scale: float = 1.0,
    effort: float = 0.5,
) -> None:
    """Writes tables and plots into `folder`.

    Args:
        folder: Made if it is not there.
        networks: Which of the seven, as the paper names them; None for all.
        measured: Whether node seconds are measured on the CPU; otherwise they are estimated from operation counts.
        scale: Part of the paper's batch size; 1 for its own.
        effort: Of `auto`, as a multiple of its usual search.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    sheets: list[Sheet] = []
    for name in networks or NAMES:
        fake = FakeNetwork(scaled(NETWORKS[NAMES[name]], scale), measured=measured)
        for outcome in outcomes_of(name, fake, effort):
            overhead = f"{outcome.made.recompute_overhead:+.1%}"
            print(name, outcome.method, f"{outcome.made.peak_bytes / GB:.2f} GB", overhead, flush=True)
            outcomes.append(outcome)
        draw(outcomes, folder / "table1.png")
        sheets = [reductions(outcomes, True), overheads(outcomes), reductions(outcomes, False), details(outcomes)]
        publish(folder, "Kusumoto et al. 2019, Tables 1 and 2", introduction(measured, effort), sheets, ["table1.png"])
    for sheet in sheets[:3]:
        sheet.show()


def introduction(measured: bool, effort: float) -> str:
    """How the figures came about."""
    return (
        "`python recipes/bench.py paper=kusumoto2019`. Printed figures are the paper's (Chainer, Tesla K40c); the "
        "others are ours at the paper's batch size and input, parameters and their gradients included. GB are 10^9 "
        "bytes. Peaks are the simulator's; those with a `metered` peak in `details.csv` were also run on fake tensors "
        f"under the meter. Seconds are {HOW_SECONDS[measured]}; `auto` searches with effort {effort:g}. Made with"
    )


def scaled(network: PaperNetwork, scale: float) -> PaperNetwork:
    """The network at a part of its batch size, rounded up."""
    return replace(network, batch_size=max(2, round(network.batch_size * scale)))


def outcomes_of(name: str, fake: FakeNetwork, effort: float) -> Iterator[Outcome]:
    """Every method of both tables, and `auto` at its lowest peak and at the lowest of theirs."""
    graph = fake.graph
    storages = merge_views(graph)

    def outcome(method: str, made: Plan, liveness: bool = True) -> Outcome:
        metered = liveness and method in METERED
        return Outcome(name, method, liveness, made, fake.metered_bytes(made) if metered else None)

    yield outcome("Vanilla", fake.plain)
    best = fake.plain
    for method, parts in paper_strategies(graph, storages):
        for liveness in (True, False):
            lower = partial(lower_sequence, graph, storages, liveness=liveness)
            made = min((replayed(graph, lower(part), method) for part in parts), key=lambda found: found.peak_bytes)
            yield outcome(method, made, liveness)
            best = min(best, made, key=lambda found: found.peak_bytes)
    for method, made in (
        ("auto", lowest(graph, "auto", effort)),
        ("auto at their lowest", planned(graph, best.peak_bytes, "auto", effort)),
    ):
        yield outcome(method, made)


def paper_strategies(graph: Graph, storages: StorageGraph) -> Iterator[tuple[str, list[list[int]]]]:
    """Each method of the paper with the partitions of the storages that it considers."""
    total = sum(storages.sizes)
    times = [10.0 if "conv" in graph.nodes[n].kind else 1.0 for n in storages.owners]
    memories = [round(size * RESOLUTION / total) for size in storages.sizes]
    problem = LowerSetProblem(tuple(times), tuple(memories), storages.edges)
    for title, family in FAMILIES.items():
        budget = minimum_budget(problem, family)
        for centric, objective in OBJECTIVES.items():
            sequence = solve(problem, budget, lower_sets=family, objective=objective)
            yield f"{title}+{centric}", [partition(len(times), sequence)]
    points = articulation_points(len(times), storages.edges)
    yield "Chen", [segments(found.m) for found in search(storages.sizes, points)]


def partition(count: int, sequence: Sequence[frozenset[int]]) -> list[int]:
    """For each storage the number of the first lower set that holds it."""
    part = [0] * count
    for number, lower_set in reversed(list(enumerate(sequence))):
        for v in lower_set:
            part[v] = number
    return part


def segments(dropped: Sequence[int]) -> list[int]:
    """For each storage the number of its segment; a segment ends with what is kept."""
    part: list[int] = []
    number = 0
    for is_dropped in dropped:
        part.append(number)
        number += not is_dropped
    return part


def reductions(outcomes: Sequence[Outcome], liveness: bool) -> Sheet:
    """One row a network, one column a method: the printed reduction and ours."""
    place = "Table 1" if liveness else "Table 2"
    published = printed(PAPER, place, "memory reduction")
    memory = printed(PAPER, place, "memory")
    methods = list(dict.fromkeys(o.method for o in outcomes if o.liveness == liveness and o.method != "Vanilla"))
    title = f"{place}: memory reduction in percent, printed → ours" + ("" if liveness else ", without liveness")
    sheet = Sheet(place.lower().replace(" ", ""), title, ["network", "plain GB", *methods], note=NOTES[place])
    for name in dict.fromkeys(o.network for o in outcomes):
        plain = next(o for o in outcomes if o.network == name).made
        row: list[object] = [name, f"{memory[name, 'Vanilla'].value} → {plain.peak_bytes / GB:.1f}"]
        for method in methods:
            ours = next(o for o in outcomes if (o.network, o.method, o.liveness) == (name, method, liveness))
            paper = published.get((name, method)) or memory.get((name, method))
            theirs = "" if paper is None else f"{paper.value if paper.unit == '%' else paper} → "
            row.append(f"{theirs}{ours.reduction:.0f}")
        sheet.rows.append(row)
    return sheet


def overheads(outcomes: Sequence[Outcome]) -> Sheet:
    """One row a network, one column a method: the metered peak and what it costs, with liveness."""
    methods = list(dict.fromkeys(o.method for o in outcomes if o.liveness))
    title = "Ours: peak in GB, and recomputation in percent of the plain step, with liveness"
    sheet = Sheet("overheads", title, ["network", "batch", "vertices", *methods])
    about = printed(PAPER, "Table 1", "vertices")
    for name in dict.fromkeys(o.network for o in outcomes):
        shown = [o for o in outcomes if o.network == name and o.liveness]
        row: list[object] = [name, about[name, ""].batch_size]
        row.append(f"{about[name, ''].value} → {len(shown[0].made.graph.nodes)}")
        row += [f"{o.made.peak_bytes / GB:.2f}, +{100 * o.made.recompute_overhead:.1f} %" for o in shown]
        sheet.rows.append(row)
    return sheet


def details(outcomes: Sequence[Outcome]) -> Sheet:
    """One row an outcome, with everything known of it."""
    columns = ["network", "batch", "input", "method", "liveness", "vertices printed", "vertices"]
    columns += ["printed GB", "printed -%", "simulated GB", "metered GB", "-%", "recomputation % of the step"]
    sheet = Sheet("details", "All figures", columns, is_on_page=False)
    vertices = printed(PAPER, "Table 1", "vertices")
    for o in outcomes:
        place = "Table 1" if o.liveness else "Table 2"
        memory = printed(PAPER, place, "memory").get((o.network, o.method))
        reduction = printed(PAPER, place, "memory reduction").get((o.network, o.method))
        about = vertices[o.network, ""]
        sheet.rows.append(
            [
                o.network,
                about.batch_size,
                about.input,
                o.method,
                "yes" if o.liveness else "no",
                about.value,
                len(o.made.graph.nodes),
                memory and memory.value,
                reduction and reduction.value,
                o.made.peak_bytes / GB,
                o.metered_bytes and o.metered_bytes / GB,
                o.reduction,
                100 * o.made.recompute_overhead,
            ]
        )
    return sheet


def draw(outcomes: Sequence[Outcome], file: Path) -> None:
    """Peak as part of the plain one: hollow marks as printed, full ones ours."""
    names = list(dict.fromkeys(o.network for o in outcomes))
    published = printed(PAPER, "Table 1", "memory reduction")
    shown = [o for o in outcomes if o.liveness and o.method not in ("Vanilla", "auto at their lowest")]
    methods = list(dict.fromkeys(o.method for o in shown))
    figure = Figure(figsize=(9, 4.4), layout="constrained", dpi=120)
    axes: Any = figure.subplots()
    for number, method in enumerate(methods):
        offset = (number - (len(methods) - 1) / 2) * 0.12
        color, is_auto = f"C{number}", method == "auto"
        places = [names.index(o.network) + offset for o in shown if o.method == method]
        peaks = [100 - o.reduction for o in shown if o.method == method]
        axes.plot(places, peaks, "*" if is_auto else "o", color=color, markersize=11 if is_auto else 6, label=method)
        theirs = [(i, 100 - published[name, method].number) for i, name in enumerate(names) if not is_auto]
        axes.plot([i + offset for i, _ in theirs], [y for _, y in theirs], "o", color=color, markerfacecolor="none")
    axes.plot([], [], "o", color="gray", markerfacecolor="none", label="as printed")
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0, 100)
    axes.set_ylabel("peak [% of the plain step's]")
    axes.set_title("Kusumoto et al. 2019, Table 1, with liveness: lowest peaks, ours full, printed hollow")
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside right center", fontsize="small")
    figure.savefig(file)
