"""Section 5.5 of Beaumont et al. 2024: throughput against memory for six strategies on chains of vision networks.

    python recipes/bench.py paper=beaumont2024
    python -c "from remat_recipes.papers.beaumont2024 import main; main('results')"  # without Hydra, in recipes/

As in the paper: `sequential` cuts the chain into 2 to 2·√L segments of equally many stages, `revolve` and `rotor` get
ten memory limits between zero and the plain peak, and then their lowest peak; and `checkmate`, whose
linear programs are slow, runs on a selection. `auto` is ours, at the same limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import ceil, sqrt
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from torchvision import models

from benchmarks.paper_scale import PaperNetwork, images
from lightning_remat import Graph, InfeasibleBudgetError, Plan, Schedule, plan
from lightning_remat.lowering import lower_kept
from lightning_remat.planners._chain.stages import cut_stages
from remat_recipes.networks.resnet_preact import cifar_resnet, imagenet_resnet
from remat_recipes.papers.fake_network import HOW_SECONDS, lowest, planned, replayed
from remat_recipes.papers.published import figures
from remat_recipes.papers.sheets import Sheet, publish

PAPER = "beaumont2024"
GIB = 2**30
LIMITS = 10
STYLES = {
    "plain": {"marker": "s", "color": "tab:red", "linestyle": ""},
    "sequential": {"marker": "x", "color": "tab:purple", "linestyle": ""},
    "revolve": {"marker": "o", "color": "tab:green"},
    "checkmate": {"marker": "P", "color": "tab:orange"},
    "rotor": {"marker": "^", "color": "tab:blue"},
    "auto": {"marker": "*", "color": "black"},
}
# Network -> image size -> batch size: those of Figures 6 and 7 and a selection of Figures 9 to 15.
EXPERIMENTS: dict[str, dict[int, int]] = {
    "ResNet18": {224: 64, 500: 16, 1000: 4},
    "ResNet50": {500: 8},
    "ResNet101": {1000: 8},
    "ResNet152": {224: 16},
    "ResNet200": {224: 16},
    "DenseNet121": {224: 32, 500: 8},
    "Inception v3": {224: 32, 500: 8, 1000: 2},
    "ResNet1001": {224: 8},
}
BUILDERS = {"ResNet200": imagenet_resnet, "ResNet1001": cifar_resnet}
OPTIONS: dict[str, dict[str, Any]] = {"Inception v3": {"init_weights": False, "aux_logits": False}}


@dataclass(frozen=True, slots=True)
class Point:
    """One plan of a strategy.

    Attributes:
        strategy: Its name.
        made: The plan.
        images_per_second: At the simulator's seconds.
    """

    strategy: str
    made: Plan
    images_per_second: float


@dataclass(frozen=True, slots=True)
class Experiment:
    """One network at one size: every point of its plot.

    Attributes:
        gains: Planner -> its throughput over the fastest sequential's at no more than its memory, in percent: the
            paper's measure. None where it finds nothing there.
    """

    network: str
    size: int
    batch_size: int
    points: tuple[Point, ...]
    gains: Mapping[str, float | None]

    @property
    def title(self) -> str:
        return f"{self.network}, batch {self.batch_size}, {self.size} x {self.size}"

    def of(self, strategy: str) -> list[Point]:
        """The points of one strategy by rising peak."""
        return sorted((p for p in self.points if p.strategy == strategy), key=lambda p: p.made.peak_bytes)

    @property
    def fastest_sequential(self) -> Point:
        return max(self.of("sequential"), key=lambda point: point.images_per_second)


def main(
    folder: str | Path,
    experiments: Mapping[str, Mapping[int, int]] | None = None,
    strategies: Sequence[str] = ("revolve", "rotor", "auto"),
    checkmate: Sequence[str] = ("ResNet18",),
    *,
    measured: bool = False,
    effort: float = 0.25,
) -> None:
    """Writes tables and plots into `folder`.

    Args:
        folder: Made if it is not there.
        experiments: Network -> image size -> batch size; None for `EXPERIMENTS`.
        strategies: Planners besides plain and sequential.
        checkmate: The networks on which Checkmate's relaxation is solved too, at the smallest size.
        measured: Whether node seconds are measured on the CPU; otherwise they are estimated from operation counts.
        effort: Of `auto`, as a multiple of its usual search.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    done: list[Experiment] = []
    pictures: list[str] = []
    sheets: list[Sheet] = []
    for network, sizes in (experiments or EXPERIMENTS).items():
        for size, batch_size in sizes.items():
            extra = ("checkmate",) if network in checkmate and size == min(sizes) else ()
            done.append(run(network, int(size), batch_size, (*extra, *strategies), measured, effort))
        pictures.append(draw([e for e in done if e.network == network], folder))
        sheets = [summary(done), side_by_side(done), points(done)]
        publish(folder, "Beaumont et al. 2024, section 5.5", introduction(measured, effort), sheets, pictures)
    for sheet in sheets[:2]:
        sheet.show()


def introduction(measured: bool, effort: float) -> str:
    """How the figures came about."""
    return (
        "`python recipes/bench.py paper=beaumont2024`. Throughput is the batch over the simulator's seconds of a "
        f"step, {HOW_SECONDS[measured]}; memory is the simulator's peak on profiles of fake tensors, parameters and "
        f"their gradients included; `auto` searches with effort {effort:g}. Made with"
    )


def run(
    network: str, size: int, batch_size: int, strategies: Sequence[str], measured: bool, effort: float
) -> Experiment:
    """All points of one plot."""
    paper_network = network_of(network, size, batch_size)
    graph = paper_network.measured_graph() if measured else paper_network.graph()
    plain = plan(graph, 1 << 62, "keep_all")
    found: list[tuple[str, Plan]] = [("plain", plain)]
    found += [("sequential", replayed(graph, schedule)) for schedule in sequential(graph)]
    for strategy in strategies:
        found += [(strategy, made) for made in curve(graph, strategy, plain.peak_bytes, effort)]
    points = tuple(Point(strategy, made, batch_size / made.simulation.seconds) for strategy, made in found)
    fastest = min((made for name, made in found if name == "sequential"), key=lambda made: made.simulation.seconds)
    gains = {name: gain(fastest, name, effort) for name in strategies if name in ("rotor", "auto")}
    done = Experiment(network, size, batch_size, points, gains)
    print(done.title, f"plain {plain.peak_bytes / GIB:.2f} GiB, {len(points)} points", flush=True)
    return done


def gain(fastest: Plan, planner: str, effort: float) -> float | None:
    """By how many percent the planner is faster than that plan in its memory; None where it finds nothing there."""
    try:
        made = planned(fastest.graph, fastest.peak_bytes, planner, effort)
    except InfeasibleBudgetError:
        return None
    return 100 * (fastest.simulation.seconds / made.simulation.seconds - 1)


def network_of(name: str, size: int, batch_size: int) -> PaperNetwork:
    """The network that the paper names so: torchvision's, and those of He et al. 2016."""
    builder = BUILDERS.get(name) or getattr(models, name.lower().replace(" ", "_"))
    build: Any = partial(builder, **OPTIONS.get(name, {}))
    return PaperNetwork(build, images(size), batch_size, 1)


def sequential(graph: Graph) -> Iterator[Schedule]:
    """PyTorch's `checkpoint_sequential` on the chain of stages, with ten numbers of segments from 2 to 2·√L."""
    stages = cut_stages(graph)
    most = min(len(stages), ceil(2 * sqrt(len(stages))))
    for count in sorted({2 + round((most - 2) * k / (LIMITS - 1)) for k in range(LIMITS)}):
        first = [len(stages) * k // count for k in range(count)]  # of each segment
        kept = {n for k in first[1:] for n in stages[k - 1].exit}
        yield lower_kept(graph, kept | set(range(stages[first[-1]].start, len(graph.nodes))))


def curve(graph: Graph, planner: str, plain_bytes: int, effort: float) -> Iterator[Plan]:
    """The planner at equally spaced limits up to the plain peak, and at its lowest peak."""
    for k in range(LIMITS, 0, -1):
        try:
            yield planned(graph, plain_bytes * k // LIMITS, planner, effort)
        except InfeasibleBudgetError:
            break
    yield lowest(graph, planner, effort)


def summary(done: Sequence[Experiment]) -> Sheet:
    """One row a network and size: what rotor and `auto` gain over sequential at its memory, and how low each goes."""
    planners = [name for name in ("rotor", "auto") if any(e.of(name) for e in done)]
    columns = ["network", "image", "batch", "plain GiB", "fastest sequential GiB"]
    columns += [f"{name} over sequential %" for name in planners]
    shown = [name for name in STYLES if any(e.of(name) for e in done)]
    columns += [f"{name} lowest GiB" for name in shown if name != "plain"]
    sheet = Sheet("summary", "Throughput gained over sequential in the same memory", columns)
    gains: dict[str, list[float]] = {name: [] for name in planners}
    for e in done:
        row: list[object] = [e.network, e.size, e.batch_size, e.of("plain")[0].made.peak_bytes / GIB]
        row.append(e.fastest_sequential.made.peak_bytes / GIB)
        for name in planners:
            found = e.gains.get(name)
            row.append(found)
            gains[name] += [] if found is None else [found]
        for name in shown[1:]:
            at = e.of(name)
            row.append(at[0].made.peak_bytes / GIB if at else None)
        sheet.rows.append(row)
    printed = next(f for f in figures(PAPER, "section 5.5") if f.quantity == "throughput gain")
    averages = (f"{name} {mean(found):+.1f} % over {len(found)} experiments" for name, found in gains.items() if found)
    sheet.note = f"On average: {', '.join(averages)}; the paper prints +{printed} for rotor, over all of its own."
    return sheet


def side_by_side(done: Sequence[Experiment]) -> Sheet:
    """What the paper prints of Figures 6 and 7 beside ours."""
    sheet = Sheet(
        "printed", "Figures printed in the text", ["figure", "network", "batch", "method", "", "paper", "ours"]
    )
    sheet.note = (
        "Throughputs are the paper's V100's and our estimate: compare their ratios. The paper's sequential and rotor "
        "at batch 8 are what fits its 15.75 GiB. Its plain ResNet1001 takes four times our memory, as ours would with "
        "four times He et al.'s widths, which are 16 to 64."
    )
    for place in ("Figure 6", "Figure 7"):
        for f in figures(PAPER, place):
            size = int(f.input.split("x")[-1])
            for e in done:
                if (e.network, e.size) == (f.network, size):
                    about = [place, f.network, f.batch_size, f.method, f.quantity]
                    sheet.rows.append([*about, str(f), ours(e, f.method, f.quantity, int(f.batch_size))])
    return sheet


CARD_BYTES = int(15.75 * GIB)


def ours(e: Experiment, method: str, quantity: str, batch_size: int) -> str:
    """Our figure for a printed one: the plain step at its batch size, or the fastest that fits the paper's card."""
    if method == "PyTorch":
        made = plain_step(e.network, e.size, batch_size)
    else:
        fitting = [p.made for p in e.of(method.split(",")[0]) if p.made.peak_bytes <= CARD_BYTES]
        if not fitting:
            return "does not fit the card"
        made, batch_size = min(fitting, key=lambda plan: plan.simulation.seconds), e.batch_size
    if quantity == "memory":
        return f"{made.peak_bytes / GIB:.2f} GiB"
    return f"{batch_size / made.simulation.seconds:.3g} images/s"


@cache
def plain_step(network: str, size: int, batch_size: int) -> Plan:
    """The step without recomputation."""
    return plan(network_of(network, size, batch_size).graph(), 1 << 62, "keep_all")


def points(done: Sequence[Experiment]) -> Sheet:
    """Every point of every plot."""
    columns = ["network", "image", "batch", "strategy", "limit GiB", "peak GiB", "images/s", "recomputation %"]
    sheet = Sheet("points", "All points", columns, is_on_page=False)
    for e in done:
        for p in e.points:
            limit = None if p.strategy in ("plain", "sequential") else p.made.budget_bytes / GIB
            cells = (p.made.peak_bytes / GIB, p.images_per_second, 100 * p.made.recompute_overhead)
            sheet.rows.append([e.network, e.size, e.batch_size, p.strategy, limit, *cells])
    return sheet


def draw(done: Sequence[Experiment], folder: Path) -> str:
    """Throughput over peak, one panel a size; the picture's file name."""
    figure = Figure(figsize=(4.2 * len(done) + 1.6, 3.8), layout="constrained", dpi=110)
    panels: Any = figure.subplots(1, len(done), squeeze=False)[0]
    for axes, e in zip(panels, done, strict=True):
        for strategy, style in STYLES.items():
            at = e.of(strategy)
            if at:
                peaks = [p.made.peak_bytes / GIB for p in at]
                axes.plot(peaks, [p.images_per_second for p in at], **style, markersize=6, label=strategy)
        axes.set_xlim(left=0)
        axes.set_title(e.title, fontsize="medium")
        axes.set_xlabel("peak [GiB]")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("throughput [images/s], estimated")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize="small")
    name = done[0].network.lower().replace(" ", "_") + ".png"
    figure.savefig(folder / name)
    return name
