"""The rows of the comparison with peers, as CSV, Markdown and a picture."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from matplotlib.figure import Figure

from lightning_remat.budget import format_bytes

COUNTED = "estimated from operations"
CLAIM = 1.13
"""Throughput of Rotor over checkpoint_sequential at equal memory, on average, by its authors."""


@dataclass(frozen=True, slots=True)
class Row:
    """One method on one network, and `auto` with the method's peak for a budget.

    Attributes:
        network: Its name.
        method: That of the peer, with its setting.
        plain_bytes: Measured peak of the plain step.
        peak_bytes: Measured peak of the peer; None where it could not run.
        allocated_bytes: The same by the allocator; None on fake tensors.
        exact: Whether gradients and buffers are bitwise those of the plain step.
        ratio: Seconds of a step over those of the plain step.
        auto_bytes: Measured peak of `auto`; None, as all that follow, where its floor is higher.
        auto_allocated_bytes: The same by the allocator.
        auto_ratio: Seconds of a step of `auto` over those of the plain step.
        gain: Throughput of `auto` over that of the peer.
        seconds: How the seconds were found; empty where there are none.
    """

    network: str
    method: str
    plain_bytes: int
    peak_bytes: int | None = None
    allocated_bytes: int | None = None
    exact: str = ""
    ratio: float | None = None
    auto_bytes: int | None = None
    auto_allocated_bytes: int | None = None
    auto_ratio: float | None = None
    gain: float | None = None
    seconds: str = ""

    def beside(self, auto_bytes: int, auto_ratio: float, gain: float) -> Row:
        """With the figures of `auto`."""
        return replace(self, auto_bytes=auto_bytes, auto_ratio=auto_ratio, gain=gain)


_INTEGERS = {"plain_bytes", "peak_bytes", "allocated_bytes", "auto_bytes", "auto_allocated_bytes"}
_TEXTS = {"network", "method", "exact", "seconds"}


def read_rows(file: Path) -> list[Row]:
    """The rows that `write_results` wrote; none where there is no file."""
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        return [Row(**{name: _value(name, text) for name, text in line.items()}) for line in csv.DictReader(lines)]


def _value(name: str, text: str) -> str | int | float | None:
    if name in _TEXTS:
        return text
    if not text:
        return None
    return int(text) if name in _INTEGERS else float(text)


def write_results(folder: Path, rows: Sequence[Row]) -> list[Row]:
    """Puts the rows in the place of the former ones of their networks; returns all there are."""
    folder.mkdir(parents=True, exist_ok=True)
    renewed = {row.network for row in rows}
    every = [row for row in read_rows(folder / "peers.csv") if row.network not in renewed] + list(rows)
    with (folder / "peers.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in every)
    (folder / "README.md").write_text(
        f"# auto beside its peers\n\n{summary(every)}\n\n{table(every)}\n\n![Step time over peak](peers.png)\n"
    )
    return every


def is_sequential(row: Row) -> bool:
    return row.method.startswith("checkpoint_sequential")


def summary(rows: Sequence[Row]) -> str:
    """The claim, checked: means of the throughput over checkpoint_sequential, timed and counted apart."""
    lines: list[str] = []
    for what in dict.fromkeys(row.seconds for row in rows if row.seconds):
        gains = [r.gain for r in rows if r.gain is not None and is_sequential(r) and r.seconds == what]
        if gains:
            mean, geometric = statistics.fmean(gains), statistics.geometric_mean(gains)
            lines.append(
                f"Throughput of `auto` over `checkpoint_sequential` at equal measured peak ({what}), {len(gains)} "
                f"settings: arithmetic mean {mean:.3f}, geometric mean {geometric:.3f}, lowest {min(gains):.3f}, "
                f"highest {max(gains):.3f}; claimed at least {CLAIM}: {'met' if geometric >= CLAIM else 'not met'}."
            )
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> str:
    """Markdown, one row a method; the fastest checkpoint_sequential of each network in bold."""
    theirs = ["peak", "by the allocator", "step time", "exact"]
    ours = [f"`auto`: {what}" for what in ("peak", "by the allocator", "step time", "throughput gained")]
    heads = ["network", "method", *theirs, *ours]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for r in rows:
        if r.peak_bytes is None:
            lines.append(f"| {r.network} | {r.method} |" + " |" * 8)
            continue
        rivals = [o.ratio for o in rows if o.network == r.network and is_sequential(o) and o.ratio is not None]
        name = f"**{r.method}**" if is_sequential(r) and r.ratio == min(rivals) else r.method
        share = f"{format_bytes(r.peak_bytes)} ({r.peak_bytes / r.plain_bytes:.0%})"
        cells = [r.network, name, share, _bytes(r.allocated_bytes), _times(r.ratio), r.exact or "–"]
        if r.auto_ratio is None:
            cells += ["floor is higher", "", "", ""]
        else:
            cells += [_bytes(r.auto_bytes), _bytes(r.auto_allocated_bytes), _times(r.auto_ratio), _times(r.gain)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _bytes(count: int | None) -> str:
    return "–" if count is None else format_bytes(count)


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.3f}×"


def plot(rows: Sequence[Row], file: Path) -> None:
    """Step time over measured peak, one picture a network: a mark for each peer, a line for `auto`."""
    names = list(dict.fromkeys(row.network for row in rows if row.ratio is not None))
    columns = min(3, len(names))
    figure = Figure(figsize=(4.6 * columns, 3.6 * -(-len(names) // columns)), layout="constrained", dpi=110)
    kinds = list(dict.fromkeys(_kind(row) for row in rows if row.ratio is not None))
    for number, name in enumerate(names):
        axes = figure.add_subplot(-(-len(names) // columns), columns, number + 1)
        here = [row for row in rows if row.network == name and row.ratio is not None]
        ours = sorted((r.auto_bytes, r.auto_ratio) for r in here if r.auto_bytes is not None)
        axes.plot([100 * b / here[0].plain_bytes for b, _ in ours], [t for _, t in ours], "k.-", label="auto")
        for kind in (k for k in kinds if any(_kind(r) == k for r in here)):
            points = [(100 * (r.peak_bytes or 0) / r.plain_bytes, r.ratio) for r in here if _kind(r) == kind]
            axes.plot(
                *zip(*points, strict=True), "osD^v"[kinds.index(kind) % 5], color=f"C{kinds.index(kind)}", label=kind
            )
        axes.axhline(1, color="tab:gray", linewidth=0.8)
        axes.set_title(name)
        axes.set_xlabel("measured peak [% of the plain step's]")
        axes.set_ylabel("step time [× plain]")
        axes.legend(fontsize="x-small")
    figure.savefig(file)


def _kind(row: Row) -> str:
    return row.method.partition(",")[0]
