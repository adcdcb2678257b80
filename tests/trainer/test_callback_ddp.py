"""Two processes on the CPU: one batch size and one plan for all ranks, and the plain run's results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ddp_run import EFFECTIVE_BATCH_SIZE, TEXTS_BYTES
from script_runs import FOLDER, MAPPED_APART


@pytest.mark.slow
def test_ranks_plan_for_the_smallest_memory_and_train_bit_by_bit_as_without(tmp_path: Path) -> None:
    """All runs in one test: to start two ranks takes far longer than to train."""
    script = FOLDER / "ddp_run.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, env=MAPPED_APART, timeout=300)
    check_search(*seen(tmp_path, "search"))
    plain, planned = seen(tmp_path, "plain"), seen(tmp_path, "keep")
    assert planned[0]["num_recomputed"] > 0
    check_buckets(planned[0], seen(tmp_path, "views")[0])
    for a, b in zip(plain, planned, strict=True):
        assert {name: b[name] for name in a} == a
    for kind in ("synchronized", "contrasting", "branching", "unused"):
        check_exchanging(seen(tmp_path, f"plain-{kind}"), seen(tmp_path, kind), kind)
    for a, b in zip(seen(tmp_path, "plain-texts"), seen(tmp_path, "texts"), strict=True):
        assert {name: b[name] for name in a} == a, "texts"
    check_texts(tmp_path)
    check_accumulation(*seen(tmp_path, "effective"))
    for kind in ("effective", "resumed"):
        for a, b in zip(seen(tmp_path, f"plain-{kind}"), seen(tmp_path, kind), strict=True):
            assert {name: b[name] for name in a} == a, kind
    for first, resumed in zip(seen(tmp_path, "effective"), seen(tmp_path, "resumed"), strict=True):
        assert resumed["schedule"] == first["schedule"]
        assert resumed["steps"] == 2 * first["steps"]
        assert resumed["sizes"] == first["sizes"]  # those of the second epoch


def seen(folder: Path, kind: str) -> list[dict[str, Any]]:
    """What each rank saw in a run."""
    return [json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in (0, 1)]


def check_search(first: dict[str, Any], second: dict[str, Any]) -> None:
    for name in ("batch_size", "schedule", "budget_bytes", "parameters"):
        assert first[name] == second[name], name
    assert first["budget_bytes"] == 16 * 2**20
    assert first["measured_peak_bytes"] <= first["budget_bytes"]
    assert first["num_recomputed"] > 0
    assert first["sizes"][:2] == [first["batch_size"]] * 2


def check_exchanging(plain: list[dict[str, Any]], planned: list[dict[str, Any]], kind: str) -> None:
    for a, b in zip(plain, planned, strict=True):
        assert {name: b[name] for name in a} == a, kind
        assert b["num_recomputed"] > 0
        assert b["measured_peak_bytes"] <= b["budget_bytes"]


def check_buckets(twice: dict[str, Any], once: dict[str, Any]) -> None:
    """DDP's buckets are a second copy of the gradients, unless these are views into them."""
    assert twice["resident_bytes"] - once["resident_bytes"] == twice["parameter_bytes"]
    assert once["num_recomputed"] > 0
    for found in (twice, once):
        assert abs(found["correction_bytes"]) < 0.02 * found["measured_peak_bytes"], found


def check_texts(folder: Path) -> None:
    """What only one rank's batch is too large for is planned anew by both, and the budget kept."""
    plans = [found["schedule"] for found in seen(folder, "texts")]
    assert plans[0] == plans[1]
    assert all(found["num_recomputed"] for found in seen(folder, "texts"))
    peaks = [json.loads((folder / f"peaks-{rank}.json").read_text()) for rank in (0, 1)]
    assert all(len(own) == 6 and max(own) <= TEXTS_BYTES for own in peaks), peaks


def check_accumulation(first: dict[str, Any], second: dict[str, Any]) -> None:
    for name in ("batch_size", "accumulated", "steps", "schedule", "parameters"):
        assert first[name] == second[name], name
    assert first["batch_size"] * first["accumulated"] * 2 == EFFECTIVE_BATCH_SIZE
    assert first["accumulated"] > 1
    assert first["num_recomputed"] > 0
    assert first["steps"] == -(-400 // EFFECTIVE_BATCH_SIZE)
