"""The least budget that an error tells is one: models of Hugging Face, tiny, are planned for exactly it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import ATTENTION, JAMBA, MARKS, Case, language_model
from torch import nn

from benchmarks.peaks import LOSS_BYTES, measured_peak
from lightning_remat import InfeasibleBudgetError, rematerialize

pytestmark = MARKS

TOKENS = torch.arange(32).reshape(2, 16) % 97


def called(model: nn.Module, *, with_labels: bool = True) -> Case:
    labels = {"labels": TOKENS} if with_labels else {}
    return model, {"input_ids": TOKENS, "use_cache": False, **labels}


def whisper() -> Case:
    transformers: Any = pytest.importorskip("transformers")
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32, "vocab_size": 128}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    suppressed = {"suppress_tokens": None, "begin_suppress_tokens": None}
    config = transformers.WhisperConfig(**layers, **heads, **sizes, **special, **suppressed)
    model = transformers.WhisperForConditionalGeneration(config).train()
    return model, {"input_features": torch.randn(2, 16, 64), "labels": TOKENS}


def autoencoder() -> Case:
    diffusers: Any = pytest.importorskip("diffusers")
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = diffusers.AutoencoderKL(block_out_channels=(16, 32), norm_num_groups=4, **blocks).train()
    return model, {"sample": torch.randn(1, 3, 32, 32)}


CASES: dict[str, Callable[[], Case]] = {
    "llama without labels": lambda: called(language_model("llama", **ATTENTION), with_labels=False),
    "mixtral": lambda: called(language_model("mixtral", **ATTENTION, num_local_experts=2)),
    "gpt-neox": lambda: called(language_model("gpt_neox", num_attention_heads=4, intermediate_size=64)),
    "jamba": lambda: called(language_model("jamba", **JAMBA)),
    "whisper": whisper,
    "vae": autoencoder,
}


@pytest.mark.parametrize("name", CASES)
def test_at_exactly_the_least_budget_a_model_is_planned(name: str) -> None:
    torch.manual_seed(0)
    module, kwargs = CASES[name]()
    with pytest.raises(InfeasibleBudgetError) as caught:
        rematerialize(module, memory_budget=1, planner="periodic", **kwargs)
    least = int(caught.value.minimum_bytes)
    plan = rematerialize(module, memory_budget=least, planner="periodic", **kwargs)
    assert plan.num_recomputed
    # The first step has hooks where something rests in further ones, whose backwards hold longer what they read.
    peaks = [measured_peak(module, **kwargs) - LOSS_BYTES for _ in range(3)]
    assert peaks[1:] == pytest.approx([plan.peak_bytes] * 2, rel=0.01)
    assert max(peaks) <= least
