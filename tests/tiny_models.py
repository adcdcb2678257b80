"""Models of Hugging Face at toy size."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

MARKS = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
"""Of the tests that run models of libraries, which warn of their own."""

Case = tuple[nn.Module, dict[str, Any]]
"""A model and its arguments."""

ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}

JAMBA = {
    **ATTENTION,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 2,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
}


def language_model(kind: str, **sizes: Any) -> nn.Module:
    """One of two layers, in training mode."""
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, vocab_size=128, num_hidden_layers=2, hidden_size=32, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).train()
