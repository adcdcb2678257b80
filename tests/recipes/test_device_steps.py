"""The benchmark of steps on a device, at toy size on the CPU; on CUDA the same code runs at the papers' sizes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from remat_runs import network

from benchmarks import device_steps
from benchmarks.paper_scale import PaperNetwork, images


@pytest.mark.slow
def test_a_row_for_each_budget_with_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_steps, "NETWORKS", {"toy": PaperNetwork(network, images(16), 8, 2)})
    output = tmp_path / "results" / "steps.md"
    command = ["device_steps.py", "--device", "cpu", "--budgets", "0.6", "--rounds", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    device_steps.main()
    lines = [line.split(" | ") for line in output.read_text().splitlines() if line.startswith("| toy")]
    assert [cells[2] for cells in lines] == ["plain", "60%", "lowest"]
    assert all(abs(float(cells[5].rstrip("%"))) < 1 for cells in lines)
    assert torch.__version__ in output.read_text()


def test_out_of_memory_on_purpose_is_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["device_steps.py", "--device", "cpu", "--largest"])
    with pytest.raises(SystemExit):
        device_steps.main()


@pytest.mark.parametrize("limit", [0, 1, 2, 13, 64])
def test_the_largest_that_survives(limit: int) -> None:
    assert device_steps.largest(lambda n: n <= limit) == limit
