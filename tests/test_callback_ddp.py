"""Two processes on the CPU: one batch size and one plan for all ranks, and the plain run's results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def ranks(folder: Path, kind: str) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("ddp_run.py")
    paths = os.pathsep.join([str(script.parent), str(script.parent.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(script), str(folder), kind], check=True, env=environment, timeout=300)
    return [json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
def test_ranks_plan_for_the_smallest_memory(tmp_path: Path) -> None:
    first, second = ranks(tmp_path, "search")
    for name in ("batch_size", "schedule", "budget_bytes", "parameters"):
        assert first[name] == second[name], name
    assert first["budget_bytes"] == 16 * 2**20
    assert first["measured_peak_bytes"] <= first["budget_bytes"]
    assert first["num_recomputed"] > 0
    assert first["sizes"][:2] == [first["batch_size"]] * 2


@pytest.mark.slow
def test_distributed_run_is_bit_identical(tmp_path: Path) -> None:
    plain, planned = ranks(tmp_path, "plain"), ranks(tmp_path, "keep")
    assert planned[0]["num_recomputed"] > 0
    for a, b in zip(plain, planned, strict=True):
        assert {name: b[name] for name in a} == a
