"""Two processes on the CPU: rematerialized units under FSDP2 train to the bits of plain FSDP2, on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sharded_run import RUNS


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """What both ranks have passed, and what was printed: one start of two processes serves for all."""
    folder = tmp_path_factory.mktemp("sharded")
    script = Path(__file__).parent.parent / "sharded_run.py"
    paths = os.pathsep.join([str(script.parent), str(script.parent.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, str(script), str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    passed = [
        set((folder / f"done-{rank}").read_text().split()) for rank in (0, 1) if (folder / f"done-{rank}").exists()
    ]
    return sorted(set.intersection(*passed) if len(passed) == 2 else ()), ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["in_trainer", *RUNS])
def test_the_bits_of_plain_fsdp2(name: str, done: tuple[list[str], str]) -> None:
    passed, output = done
    assert name in passed, output
