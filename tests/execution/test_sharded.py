"""Two processes on the CPU: rematerialized units under FSDP2 train to the bits of plain FSDP2, on every rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from script_runs import FOLDER, MAPPED_APART
from sharded_fits import FITS
from sharded_run import RUNS


def start(folder: Path, what: str) -> subprocess.CompletedProcess[str]:
    """Runs the script, which starts the other processes itself."""
    script = FOLDER / "sharded_run.py"
    return subprocess.run(
        [sys.executable, str(script), str(folder), what],
        env=MAPPED_APART,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """What both ranks have passed, and what was printed: one start of two processes serves for all."""
    folder = tmp_path_factory.mktemp("sharded")
    ran = start(folder, "two")
    passed = [
        set((folder / f"done-{rank}").read_text().split()) for rank in (0, 1) if (folder / f"done-{rank}").exists()
    ]
    return sorted(set.intersection(*passed) if len(passed) == 2 else ()), ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FITS, *RUNS])
def test_the_bits_of_plain_fsdp2(name: str, done: tuple[list[str], str]) -> None:
    passed, output = done
    assert name in passed, output


@pytest.mark.slow
@pytest.mark.parametrize(("how", "error"), [("fails", "ArithmeticError"), ("runs_out", "RuntimeError: Default")])
def test_a_step_that_fails_on_one_rank_ends_all_with_its_error(how: str, error: str, tmp_path: Path) -> None:
    ran = start(tmp_path, how)
    assert ran.returncode != 0
    for rank in (0, 1):
        told = (tmp_path / f"failed-{rank}").read_text()
        assert "OtherRankError: process 1 of 2 has failed" in told, told
        assert error in told, told
        assert "of the second process" in told, told


@pytest.mark.slow
def test_four_processes(tmp_path: Path) -> None:
    ran = start(tmp_path, "four")
    for rank in range(4):
        assert (tmp_path / f"done-{rank}").exists(), ran.stdout
