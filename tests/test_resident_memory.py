"""The memory that a process takes beside its tensors is seen where the system tells it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_remat import profile, simulate, trace
from lightning_remat.lowering import lower_kept
from lightning_remat.meter import measure_growth, measure_peak
from lightning_remat.resident_memory import ResidentGrowth, can_measure_resident

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
    with torch.no_grad(), measure_growth(x.device) as tensors:
        convolution(x)
    with torch.no_grad(), measure_growth(x.device, with_scratch=True) as everything:
        convolution(x)
    assert tensors.peak_bytes == x.nbytes
    assert everything.peak_bytes > 1.5 * x.nbytes


@needs_onednn
def test_profile_with_scratch_predicts_what_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 4, 3))
    x = torch.randn(80, 3, 64, 64)  # malloc hands tensors of more than 32 MiB back at once
    traced = trace(net, x)
    bare, full = profile(traced, x), profile(traced, x, with_scratch=True)
    assert full.nodes[2].forward_workspace_bytes > bare.nodes[2].forward_workspace_bytes
    predicted = simulate(full, lower_kept(full, range(len(full.nodes)))).peak_bytes

    def step() -> None:
        net.zero_grad()
        net(x).sum().backward()

    step()
    peaks: list[int] = []
    for _ in range(3):  # other threads of the process may take memory meanwhile
        net.zero_grad()
        with measure_peak(include=[net, x], with_scratch=True) as measured:
            step()
        peaks.append(measured.peak_bytes)
    assert min(peaks) == pytest.approx(predicted, rel=0.15)
