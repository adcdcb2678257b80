"""The plot of a training: what Lightning's CSVLogger wrote, over the steps."""

import csv
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

Points = list[tuple[int, float]]


def read_metrics(file: Path) -> dict[str, Points]:
    """Metric -> (step, value) in the order they were logged; cells that are empty were not logged at that step."""
    metrics: dict[str, Points] = defaultdict(list)
    with file.open() as lines:
        for row in csv.DictReader(lines):
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    metrics[name].append((int(row["step"]), float(value)))
    return dict(metrics)


def plot_training(folder: Path) -> Path:
    """Draws `training.png` beside `metrics.csv`: the losses, and the validation metrics; the test's as a last point."""
    metrics = read_metrics(folder / "metrics.csv")
    figure = Figure(figsize=(9, 3.6), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2)
    for name, points in sorted(metrics.items()):
        stage, _, what = name.partition("/")
        if stage not in ("train", "val", "test"):
            continue
        axes = left if what == "loss" else right
        axes.plot(*zip(*points, strict=True), "*" if stage == "test" else ".-", label=f"{name} {points[-1][1]:.3f}")
    left.set_ylabel("loss")
    right.set_ylabel("metric")
    for axes in (left, right):
        axes.set_xlabel("step")
        if axes.has_data():
            axes.legend()
    path = folder / "training.png"
    figure.savefig(path)
    return path
