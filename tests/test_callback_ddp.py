"""Two processes on the CPU: one batch size and one plan for all ranks, and the plain run's results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

Runs = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What each rank saw, by kind of run."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("ddp_run.py")
    paths = os.pathsep.join([str(script.parent), str(script.parent.parent)])
    # A toy's tensors lie in the C library's heap, whose gaps are as large as the toy; mapped apart, they leave none.
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "16384"}
    subprocess.run([sys.executable, str(script), str(folder)], check=True, env=environment, timeout=300)
    return {
        kind: [json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in (0, 1)]
        for kind in ("plain", "keep", "search")
    }


@pytest.mark.slow
def test_ranks_plan_for_the_smallest_memory(runs: Runs) -> None:
    first, second = runs["search"]
    for name in ("batch_size", "schedule", "budget_bytes", "parameters"):
        assert first[name] == second[name], name
    assert first["budget_bytes"] == 16 * 2**20
    assert first["measured_peak_bytes"] <= first["budget_bytes"]
    assert first["num_recomputed"] > 0
    assert first["sizes"][:2] == [first["batch_size"]] * 2


@pytest.mark.slow
def test_distributed_run_is_bit_identical(runs: Runs) -> None:
    plain, planned = runs["plain"], runs["keep"]
    assert planned[0]["num_recomputed"] > 0
    for a, b in zip(plain, planned, strict=True):
        assert {name: b[name] for name in a} == a
