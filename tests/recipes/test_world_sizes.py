"""The table of a world on a laptop, at toy size."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import world_sizes


@pytest.mark.slow
def test_rows_for_each_world_and_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "worlds.md"
    sizes = ["--width", "128", "--blocks", "3", "--length", "64", "--batch-size", "2"]
    monkeypatch.setattr(sys, "argv", ["world_sizes.py", "2", "8", *sizes, "--output", str(output)])
    world_sizes.main()
    lines = output.read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["2"] * world_sizes.NUM_BUDGETS + ["8"] * world_sizes.NUM_BUDGETS
    assert float(rows[0][1]) > float(rows[-1][1])  # the larger world has smaller shards
    recomputed = [int(row[3]) for row in rows[-world_sizes.NUM_BUDGETS :]]  # of the world whose shards are small
    assert recomputed[0] > recomputed[-1]
    assert output.with_suffix(".png").stat().st_size > 1000
