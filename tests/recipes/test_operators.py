"""Operators of PyTorch's own list, between others, all of which run again.

In a process of its own: the list's module forbids to set the flags of backends from then on.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from script_runs import ENVIRONMENT, FOLDER

KINDS = ("cumsum", "linalg.qr", "grid_sample", "dropout2d", "max_pool2d", "index_put", "fft.rfft", "erf")


@pytest.mark.slow
def test_operators_are_bitwise_equal() -> None:
    pytest.importorskip("expecttest")
    script = FOLDER.parent / "recipes" / "benchmarks" / "operators.py"
    command = [sys.executable, str(script), *KINDS, "--samples", "2"]
    found = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-2000:]
    assert "other bits" not in found.stdout
    assert "Of 0 " not in found.stdout
    assert "train exactly as without us" in found.stdout
