"""Figures 5 to 7 of Chen et al. 2016: memory and time against depth and length, by allocation strategy and by planner.

    python recipes/bench.py paper=chen2016
    python -c "from remat_recipes.papers.chen2016 import main; main('results')"  # without Hydra, in recipes/

The networks are the paper's: pre-activation ResNets of growing depth at batch 32 and 3 x 224 x 224, and the LSTM of
its section 5.3 in elementary operations, unrolled over growing lengths at batch 64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import log
from pathlib import Path
from statistics import linear_regression
from typing import Any, get_args

from matplotlib.figure import Figure

from benchmarks.paper_scale import PaperNetwork, images, tokens
from lightning_remat import Graph, InfeasibleBudgetError, Plan, plan, simulate
from remat_recipes.networks.lstm import LSTM
from remat_recipes.networks.resnet_preact import imagenet_resnet
from remat_recipes.papers.allocation import Strategy, allocate
from remat_recipes.papers.fake_network import FakeNetwork, lowest, planned, without_parameters
from remat_recipes.papers.published import printed
from remat_recipes.papers.sheets import Sheet, publish

PAPER = "chen2016"
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
PLANNERS = ("chen", "chen_recursive", "rotor", "auto")
MOST_OVERHEAD = 0.35  # of the plain step: what one more forward costs, which the paper gives as 30 %
RESNET200 = (3, 24, 36, 3)
GB = 1e9


def main(
    folder: str | Path,
    depths: Sequence[int] = (50, 101, 200, 401, 1001),
    lengths: Sequence[int] = (8, 16, 32, 64),
    planners: Sequence[str] = PLANNERS,
    *,
    batch_sizes: Sequence[int] = (32, 64),
    image_size: int = 224,
    hidden_size: int = 1024,
    metered: bool = True,
    effort: float = 0.5,
) -> None:
    """Writes tables and plots into `folder`.

    Args:
        folder: Made if it is not there.
        depths: Layers of the ResNets, 3n + 2 each.
        lengths: Steps of the LSTM.
        planners: Of the table of sublinear growth.
        batch_sizes: That of the ResNets and that of the LSTM.
        image_size: Height and width.
        hidden_size: Of the LSTM's layers.
        metered: Whether `auto`'s steps run on fake tensors, under the meter.
        effort: Of `auto`, as a multiple of its usual search.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    resnets = Curve("ResNet", "layers")
    growth = Sheet(
        "sublinear",
        "Sublinear in depth: lowest peaks",
        ["layers", "planner", "plain GB", "peak GB", "metered GB", "without parameters GB", "recomputation %"],
    )
    lstms = Curve("LSTM", "steps")

    def write() -> None:
        growth.note = exponents(growth)
        curves = {"figure5": resnets, "figure6": lstms}
        measured = {name: curve for name, curve in curves.items() if curve.sizes}
        for name, curve in measured.items():
            curve.draw(folder / f"{name}.png", name)
        draw_seconds(list(measured.values()), folder / "figure7.png")
        sheets = [*(curve.sheet(name) for name, curve in measured.items()), growth]
        pictures = [f"{name}.png" for name in (*measured, "figure7")]
        publish(folder, "Chen et al. 2016, Figures 5 to 7", introduction(effort), sheets, pictures)

    for depth in depths:
        network = PaperNetwork(partial(imagenet_resnet, blocks_of(depth)), images(image_size), batch_sizes[0], 1)
        fake = FakeNetwork(network)
        resnets.measure(depth, fake.graph, effort)
        for planner in planners:
            growth.rows += growth_rows(depth, fake, planner, metered, effort)
        write()
    for length in lengths:
        build = partial(LSTM, hidden_size=hidden_size, num_steps=length, cell="elementary")
        lstms.measure(length, PaperNetwork(build, tokens(length, 5000), batch_sizes[1], 1).graph(), effort)
        write()
    for sheet in (resnets.sheet("figure5"), growth, lstms.sheet("figure6")):
        sheet.show()


def introduction(effort: float) -> str:
    """How the figures came about."""
    return (
        "`python recipes/bench.py paper=chen2016`. GB are 10^9 bytes. The paper prints curves and these figures: "
        f"{claims()}. Feature maps are what static allocation gives out (section 3), without parameters and "
        "workspaces; peaks are the simulator's, with parameters and their gradients; `metered` is the peak of a step "
        "that really ran by the plan on fake tensors. Seconds are estimated from operation counts; `auto` searches "
        f"with effort {effort:g}. Made with"
    )


def blocks_of(depth: int) -> tuple[int, ...]:
    """Bottleneck blocks of the four stages, in about the proportions of ResNet200.

    Raises:
        ValueError: The depth is not 3n + 2 with n at least 4.
    """
    num_blocks, rest = divmod(depth - 2, 3)
    if rest or num_blocks < len(RESNET200):
        raise ValueError(f"depth {depth} is not 3n + 2 with n at least 4, for four stages of blocks of 3 layers")
    first, second, _, last = (max(1, num_blocks * share // sum(RESNET200)) for share in RESNET200)
    return first, second, num_blocks - first - second - last, last


def claims() -> str:
    """What the text of the paper says in figures."""
    found = {
        f"{f.network}, {f.method}: {quantity} {f} ({f.place})"
        for place, quantity in (
            ("section 5.2", "memory"),
            ("section 5.2", "memory ratio"),
            ("section 5.3", "memory ratio"),
            ("section 5.4", "time overhead"),
        )
        for f in printed(PAPER, place, quantity).values()
    }
    return "; ".join(sorted(found))


def lowest_within(graph: Graph, most_overhead: float, effort: float) -> Plan:
    """`auto`'s plan of the lowest peak among those that recompute at most this part of the step."""
    low, high = 0, plan(graph, 1 << 62, "keep_all").peak_bytes  # too little; enough
    best = planned(graph, high, "auto", effort)
    while high - low > high // 2000:
        middle = (low + high) // 2
        try:
            found = planned(graph, middle, "auto", effort)
        except InfeasibleBudgetError:
            low = middle
            continue
        if found.recompute_overhead <= most_overhead:
            best, high = found, min(middle, found.peak_bytes)
        else:
            low = middle
    return best


class Curve:
    """Feature maps and seconds of one network over its depth or length."""

    def __init__(self, network: str, unit: str) -> None:
        self.network, self.unit = network, unit
        self.sizes: list[int] = []
        self.gigabytes: dict[str, list[float]] = {}
        self.seconds: dict[str, list[float]] = {}

    def measure(self, size: int, graph: Graph, effort: float) -> None:
        """Allocates the step by every strategy, and that of `auto` with the paper's sharing of buffers."""
        self.sizes.append(size)
        found = {strategy: allocate(graph, strategy) for strategy in STRATEGIES}
        found["auto"] = allocate(graph, schedule=lowest_within(graph, MOST_OVERHEAD, effort).schedule)
        for name, allocation in found.items():
            self.gigabytes.setdefault(name, []).append(allocation.total_bytes / GB)
            self.seconds.setdefault(name, []).append(simulate(graph, allocation.schedule).seconds)
            print(self.network, size, name, f"{allocation.total_bytes / GB:.2f} GB", flush=True)

    def sheet(self, name: str) -> Sheet:
        """One row a size: feature maps by strategy, and what recomputation costs."""
        columns = [self.unit, *(f"{strategy} GB" for strategy in self.gigabytes)]
        recomputing = ("drop_bn_relu", "sublinear", "auto")
        columns += [f"{strategy} recomputation %" for strategy in recomputing]
        sheet = Sheet(name, f"Figure {name[-1]}: feature maps of the {self.network} by allocation strategy", columns)
        for k, size in enumerate(self.sizes):
            row: list[object] = [size, *(values[k] for values in self.gigabytes.values())]
            row += [100 * (self.seconds[s][k] / self.seconds["none"][k] - 1) for s in recomputing]
            sheet.rows.append(row)
        if len(self.sizes) > 1:
            slopes = (f"{name} {slope(self.sizes, values):.2f}" for name, values in self.gigabytes.items())
            sheet.note = f"Exponent of the growth with the number of {self.unit}: {', '.join(slopes)}."
        last = {name: values[-1] for name, values in self.gigabytes.items()}
        sheet.note += (
            f" At {self.sizes[-1]} {self.unit}, none takes {last['none'] / last['sharing']:.1f} times what sharing "
            f"takes, sharing {last['sharing'] / last['sublinear']:.1f} times what sublinear takes, and sublinear "
            f"{last['sublinear'] / last['auto']:.1f} times what auto takes at no more than {MOST_OVERHEAD:.0%}. "
            "The buffers are assigned afterwards: auto, which lowers the true peak, may need more of them."
        )
        return sheet

    def draw(self, file: Path, name: str) -> None:
        """Gigabytes over size, both logarithmic, as the paper draws them."""
        figure = Figure(figsize=(8, 4.4), layout="constrained", dpi=120)
        axes: Any = figure.subplots()
        for strategy, values in self.gigabytes.items():
            axes.loglog(self.sizes, values, "*-" if strategy == "auto" else "o-", label=strategy, markersize=5)
        axes.set_xticks(self.sizes, [str(size) for size in self.sizes])
        axes.minorticks_off()
        axes.set_xlabel(f"number of {self.unit}")
        axes.set_ylabel("feature maps [GB]")
        axes.set_title(f"Chen et al. 2016, Figure {name[-1]}: feature maps of the {self.network}")
        axes.grid(alpha=0.3)
        figure.legend(loc="outside right center", fontsize="small")
        figure.savefig(file)


def draw_seconds(curves: Sequence[Curve], file: Path) -> None:
    """Seconds of a step over size, with and without recomputation."""
    figure = Figure(figsize=(9, 3.8), layout="constrained", dpi=120)
    panels: Any = figure.subplots(1, len(curves), squeeze=False)[0]
    for axes, curve in zip(panels, curves, strict=True):
        for name in ("sharing", "drop_bn_relu", "sublinear", "auto"):
            seconds = curve.seconds[name]
            ratio = seconds[-1] / curve.seconds["sharing"][-1] - 1
            axes.plot(curve.sizes, seconds, "*-" if name == "auto" else "o-", label=f"{name} {ratio:+.0%}")
        axes.set_xlabel(f"number of {curve.unit}")
        axes.set_ylabel("step [s], estimated")
        axes.set_ylim(bottom=0)
        axes.set_title(curve.network)
        axes.legend(fontsize="small", title="at the right end")
    figure.suptitle("Chen et al. 2016, Figure 7: time of a step")
    figure.savefig(file)


def growth_rows(
    depth: int, fake: FakeNetwork, planner: str, metered: bool, effort: float
) -> Iterator[Sequence[object]]:
    """A row for the planner's lowest peak; for `auto` also the lowest at no more than one more forward."""
    found = {planner: lowest(fake.graph, planner, effort)}
    if planner == "auto":
        found[f"auto, at most {MOST_OVERHEAD:.0%}"] = lowest_within(fake.graph, MOST_OVERHEAD, effort)
    for name, made in found.items():
        bare = simulate(without_parameters(fake.graph), made.schedule)
        measured = fake.metered_bytes(made) / GB if metered and planner == "auto" else None
        peaks = (made.plain.peak_bytes / GB, made.peak_bytes / GB, measured, bare.peak_bytes / GB)
        print(depth, name, *peaks, f"{made.recompute_overhead:.1%}", flush=True)
        yield [depth, name, *peaks, 100 * made.recompute_overhead]


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """β of values = α · sizes^β, fitted on logarithms."""
    return linear_regression([log(size) for size in sizes], [log(value) for value in values]).slope


def exponents(sheet: Sheet) -> str:
    """A sentence on how fast each planner's peak grows with the depth."""
    parts: list[str] = []
    for name in dict.fromkeys(row[1] for row in sheet.rows):
        rows: list[Any] = [row for row in sheet.rows if row[1] == name]
        if len(rows) > 1:
            depths = [row[0] for row in rows]
            whole, bare = slope(depths, [row[3] for row in rows]), slope(depths, [row[5] for row in rows])
            parts.append(f"{name} {bare:.2f} ({whole:.2f} with parameters)")
    return f"Exponent of the growth with depth, without parameters: {', '.join(parts)}." if parts else ""
