"""Two processes on the CPU: rewritten modules under DDP have the plain run's gradients."""

from __future__ import annotations

import subprocess
import sys

import pytest
from exchanging_modules import EXCHANGES
from script_runs import ENVIRONMENT, FOLDER

NAMES = ["plain", "no_sync", "unused", "sync_batch_norm", "synchronized", "sharded_later", "ddp", "search (DDP)"]
NAMES += ["threads", *(f"exchange ({name})" for name in EXCHANGES)]


@pytest.fixture(scope="module")
def output() -> str:
    """What both ranks printed, errors included."""
    script = FOLDER / "distributed_run.py"
    return subprocess.run(
        [sys.executable, str(script)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,  # planners may have to be compiled first
        check=False,
    ).stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks(name: str, output: str) -> None:
    assert output.count(f"{name} ok\n") == 2, output
