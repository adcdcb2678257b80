"""Networks of the zoo: captured, recomputed within their budgets, and the same in every bit.

Every third of it, as capturing takes most of the time; `recipes/benchmarks/architectures.py` does the same for all.
"""

from __future__ import annotations

import pytest

from benchmarks.architectures import try_small
from networks.zoo import ARCHITECTURES, Architecture

QUICK = ("mobilenet_v3_small", "PSPNet", "nn.LSTM")


SAMPLE = [a for k, a in enumerate(ARCHITECTURES) if a.name in QUICK or k % 3 == 0]


def marked() -> list[object]:
    return [pytest.param(a, id=a.name, marks=[] if a.name in QUICK else [pytest.mark.slow]) for a in SAMPLE]


@pytest.mark.parametrize("architecture", marked())
def test_a_step_at_the_lowest_peak_is_bitwise_equal(architecture: Architecture) -> None:
    if architecture.source in ("timm", "segmentation_models_pytorch", "transformers"):
        pytest.importorskip(architecture.source)
    trial = try_small(architecture)
    assert trial.plan.num_recomputed > 0
    assert not trial.different
    assert trial.peak_bytes <= 1.001 * trial.plan.budget_bytes
