"""Compiled functions work where their machine code can be kept nowhere, and where users let numba compile nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_remat

PACKAGE = Path(lightning_remat.__file__).parent

PLAN = """
import lightning_remat
from lightning_remat import Graph, Node, plan
cost = dict(output_bytes=100, forward_seconds=1.0, backward_seconds=2.0)
nodes = (Node(f"relu{i}", inputs=(i - 1,) if i else (), saved=(i,), **cost) for i in range(9))
print(lightning_remat.__file__, plan(Graph(tuple(nodes)), 800, "periodic").peak_bytes <= 800)
"""


@pytest.mark.slow
def test_planning_where_neither_package_nor_home_can_be_written(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "lightning_remat", ignore=shutil.ignore_patterns("__pycache__"))
    copy = tmp_path / "lightning_remat"
    for folder in [copy, *(f for f in copy.rglob("*") if f.is_dir())]:
        (folder / "__pycache__").write_text("")  # in the way, whatever the rights of the user who runs this
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA", "XDG"))}
    home = {"HOME": os.devnull, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", PLAN]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env={**kept, **home})
    assert done.stdout.split() == [str(copy / "__init__.py"), "True"]
    assert done.stderr.count("set NUMBA_CACHE_DIR") == 1


COMPILE = """
from lightning_remat.schedules.compiled import njit

@njit
def double(number):
    return 2 * number

@njit
def triple(number):
    return 3 * number

print(double(2), triple(2))
"""


@pytest.mark.slow
def test_compiling_is_told_once_and_only_where_it_is_done(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(COMPILE)
    command = [sys.executable, str(program)]
    cache = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    told = [subprocess.run(command, check=True, capture_output=True, text=True, env=cache) for _ in range(2)]
    assert [done.stdout.split() for done in told] == [["4", "6"]] * 2
    assert [done.stderr.count("compiles its planners") for done in told] == [1, 0]


@pytest.mark.slow
def test_planning_where_numba_compiles_nothing() -> None:
    command = [sys.executable, "-c", PLAN]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "NUMBA_DISABLE_JIT": "1"}
    )
    assert done.stdout.split()[-1] == "True"
    assert "compiles its planners" not in done.stderr
