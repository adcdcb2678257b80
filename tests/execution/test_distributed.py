"""Two processes on the CPU: rewritten modules under DDP have the plain run's gradients."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

import pytest
from script_runs import ENVIRONMENT, FOLDER

NAMES = ["plain", "no_sync", "unused", "sync_batch_norm", "synchronized", "sharded_later", "ddp"]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What both ranks printed, errors included."""
    script = FOLDER / "distributed_run.py"
    store = tmp_path_factory.mktemp("group") / "store"
    with ExitStack() as stack:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script), str(store), str(rank)],
                env=ENVIRONMENT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in (0, 1)
        ]
        for rank in ranks:
            stack.enter_context(rank)  # closes what it writes to
            stack.callback(rank.kill)
        return "".join(rank.communicate(timeout=600)[0] for rank in ranks)  # planners may have to be compiled first


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks(name: str, output: str) -> None:
    assert output.count(f"{name} ok\n") == 2, output
