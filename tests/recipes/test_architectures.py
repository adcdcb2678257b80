"""Networks of the zoo: captured, recomputed at their lowest peaks, and the same in every bit.

A few of each library, as capturing takes most of the time; `recipes/benchmarks/architectures.py` does the same for all.
"""

from __future__ import annotations

import pytest

from benchmarks.architectures import try_out
from remat_recipes.networks.zoo import ARCHITECTURES, Architecture

QUICK = ("mobilenet_v3_small", "nn.LSTM")
SLOW = (
    "shufflenet_v2_x1_0",
    "test_nfnet",
    "edgenext_xx_small",
    "levit_128s",
    "PSPNet",
    "bert (ForSequenceClassification)",
    "gemma2 (ForCausalLM)",
    "gpt2 (ForCausalLM)",
    "wav2vec2",
    "UNet2DModel",
)
"""Those in which something was wrong once, and some of every kind."""

SAMPLE = {a.name: a for a in reversed(ARCHITECTURES) if a.name in (*QUICK, *SLOW)}.values()  # each of one library


def marked() -> list[object]:
    return [pytest.param(a, id=a.name, marks=[] if a.name in QUICK else [pytest.mark.slow]) for a in SAMPLE]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", marked())
def test_steps_at_the_lowest_peak_are_bitwise_equal(architecture: Architecture) -> None:
    if architecture.source not in ("torch", "recipes"):
        pytest.importorskip(architecture.source)
    found = try_out(architecture)
    assert found.num_recomputed > 0
    assert not found.different
    assert found.measured_bytes < found.plain_bytes
