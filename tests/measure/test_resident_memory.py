"""The memory that a process takes beside its tensors is seen where the system tells it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from script_runs import ENVIRONMENT, FOLDER
from torch import nn

from lightning_remat.measure.meter import measure_growth
from lightning_remat.measure.resident_memory import ResidentGrowth, can_measure_resident

MIB = 2**20

pytestmark = pytest.mark.skipif(not can_measure_resident(), reason="the system does not tell a peak that starts anew")


def test_peak_since_the_start_is_counted_and_not_what_came_before() -> None:
    before = torch.ones(64 * MIB, dtype=torch.uint8)
    del before
    growth = ResidentGrowth()
    torch.ones(32 * MIB, dtype=torch.uint8)
    assert growth.finish() == pytest.approx(32 * MIB, rel=0.1)


needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="convolutions need no scratch memory"
)


@needs_onednn
def test_scratch_memory_of_a_convolution_is_seen_beside_tensors() -> None:
    convolution, x = nn.Conv2d(32, 32, 3, padding=1), torch.randn(64, 32, 48, 48)
    convolution(x)  # its code is made
    with torch.no_grad(), measure_growth(x.device, with_kernels=False) as tensors:
        convolution(x)
    with torch.no_grad(), measure_growth(x.device, with_scratch=True) as everything:
        convolution(x)
    assert tensors.peak_bytes == x.nbytes
    assert everything.peak_bytes > 1.5 * x.nbytes


@pytest.mark.slow
@needs_onednn
def test_profile_with_scratch_tells_what_a_step_takes_better_than_one_without() -> None:
    """How much scratch a kernel takes, and when it is handed back, differs from one processor to the next."""
    script = FOLDER / "scratch_run.py"
    done = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, env=ENVIRONMENT)
    step = json.loads(done.stdout)
    assert step["bare"] < step["full"]
    assert abs(step["full"] - step["measured"]) < 0.7 * abs(step["bare"] - step["measured"])
