"""Tables, files and plots say what the result holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_remat import Graph, Node
from lightning_remat.measure.step_clock import Reading
from lightning_remat.plans.step_memory import Surroundings
from lightning_remat.plans.step_planner import plan_step
from lightning_remat.reports.report import (
    candidates_table,
    draw_plots,
    format_table,
    kept_and_recomputed,
    result_table,
    write_report,
)
from lightning_remat.reports.result import Candidate, Result


@pytest.fixture
def result() -> Result:
    nodes = tuple(
        Node(f"n{i}", kind="relu", inputs=(i - 1,) if i else (), saved=(i,), output_bytes=2**20, forward_seconds=1.0)
        for i in range(8)
    )
    around = Surroundings(resident_bytes=0, optimizer_step_bytes=0)
    step = plan_step(["net"], {"net": Graph(nodes)}, 7 * 2**20, "periodic", around)
    fits = Candidate(8, 9 * 2**20, 7 * 2**20, 0.25, 3.2, 4.0, True, measured_peak_bytes=7 * 2**20)
    misses = Candidate(9, 10 * 2**20, 8 * 2**20, None, None, 4.0, False, "needs 8.00 MiB")
    return Result(8, 7 * 2**20, step, 7 * 2**20, 9 * 2**20, (misses, fits), 2, "8 is the largest size that fits")


def test_table_names_every_figure(result: Result) -> None:
    text = format_table(result_table(result))
    for part in ("plain peak", "9.00 MiB", "budget", "7.00 MiB", "measured peak", "recompute overhead", "periodic"):
        assert part in text
    kept, recomputed = kept_and_recomputed(result.plan)
    assert recomputed
    assert len(kept) + len(recomputed) == 8
    assert f"{len(recomputed)} × relu" in text


def test_candidates_are_listed_by_size_with_the_choice(result: Result) -> None:
    text = format_table(candidates_table(result.trials, result.choice))
    assert text.index("25.0%") < text.index("needs 8.00 MiB")
    assert "8 is the largest size that fits" in text


def test_report_file_and_plots(result: Result, tmp_path: Path) -> None:
    readings = [Reading(0.5, 16.0, 100), Reading(0.7, 12.0, None), Reading(0.6, 14.0, 300)]
    data = json.loads(write_report(result, tmp_path / "new", readings).read_text())
    draw_plots(result, tmp_path / "new")
    assert data["run"] == {"peak_bytes": 300, "step_seconds": 0.6, "samples_per_second": 14.0}
    assert data["batch_size"] == 8
    assert data["plans"]["net"]["schedule"] == str(result.plan.schedule)
    for name in ("remat_timeline.png", "remat_batch_sizes.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")


def test_no_plots_without_matplotlib(result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_remat.reports.report.can_plot", lambda: False)
    draw_plots(result, tmp_path)
    assert not list(tmp_path.iterdir())


def test_figures_are_derived_from_the_plan(result: Result) -> None:
    assert result.predicted_peak_bytes == result.step.timeline.peak_bytes <= result.budget_bytes
    assert result.prediction_error == pytest.approx(result.predicted_peak_bytes / (7 * 2**20) - 1)
    assert result.recompute_overhead == result.plan.recompute_overhead > 0
