"""transformers: models of every kind from tiny configurations: a few narrow layers, several samples of 64 tokens."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .architecture import Architecture, images, tokens

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What most configurations of text models call so."""

GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SEQ2SEQ = {
    **{k: TEXT[k] for k in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "max_position_embeddings")},
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "decoder_start_token_id": 2,
}
T5 = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4} | {
    "decoder_start_token_id": 0,
}
VISION = {k: v for k, v in TEXT.items() if "token_id" not in k and k != "vocab_size"} | {
    "image_size": 64,
    "patch_size": 8,
}
STAGES = {"depths": [1, 1, 2, 1], "hidden_sizes": [16, 32, 48, 64], "image_size": 64}
WAVES = (
    TEXT
    | {"conv_dim": (32, 32, 32), "conv_stride": (5, 4, 2), "conv_kernel": (10, 4, 2)}
    | {
        "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    }
)


def _text(length: int = 64) -> Arguments:
    ids = tokens(8, length)
    mask = torch.ones_like(ids)
    mask[::2, 3 * length // 4 :] = 0  # padding on the right of every other sample
    return (), {"input_ids": ids, "attention_mask": mask, "labels": ids}


def _unmasked(length: int = 64) -> Arguments:
    ids = tokens(8, length)
    return (), {"input_ids": ids, "labels": ids}


SHORT = 16
"""Tokens for models that go from one to the next in operations of their own: some thousand of these are enough."""


def _unlabelled() -> Arguments:
    return (), {"input_ids": tokens(8, 64)}


def _pairs() -> Arguments:
    return (), {"input_ids": tokens(8, 64), "labels": tokens(8, 48)}


def _classes() -> Arguments:
    return (), {"input_ids": tokens(8, 64), "labels": torch.randint(0, 2, (8,))}


def _images(extent: int = 64) -> Arguments:
    return (), {"pixel_values": images(4, extent), "labels": torch.randint(0, 2, (4,))}


def _pixels() -> Arguments:
    return (), {"pixel_values": images(4, 64)}


def _waves() -> Arguments:
    return (), {"input_values": torch.randn(4, 4000)}


def _pictures_with_text() -> Arguments:
    return (), {"input_ids": tokens(4, 16), "pixel_values": images(4, 64), "return_loss": True}


_TABLE: tuple[tuple[str, Callable[[], Arguments], dict[str, dict[str, Any]]], ...] = (
    (
        "AutoModelForCausalLM",
        _text,
        {
            **dict.fromkeys(
                ["gpt2", "gpt_neox", "gptj", "opt", "bloom", "xglm", "biogpt", "persimmon", "openai-gpt", "ctrl"], TEXT
            ),
            **dict.fromkeys(
                ["llama", "mistral", "gemma", "gemma2", "qwen2", "qwen3", "phi", "phi3", "stablelm"], GROUPED
            ),
            **dict.fromkeys(["starcoder2", "cohere", "olmo", "olmo2", "granite", "glm", "nemotron"], GROUPED),
            **dict.fromkeys(["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "phimoe"], GROUPED | EXPERTS),
            "gpt_neo": TEXT | {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 16},
            "gpt_bigcode": TEXT,
            "gptj": TEXT | {"rotary_dim": 8, "n_inner": 128},
            "falcon": TEXT,
            "codegen": TEXT | {"rotary_dim": 8, "n_ctx": 128},
            "mpt": TEXT | {"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 128},
            "gemma3_text": GROUPED | {"sliding_window": 16},
            "deepseek_v3": TEXT
            | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16}
            | {"q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
            | {"moe_intermediate_size": 64, "first_k_dense_replace": 1},
        },
    ),
    (
        "AutoModelForCausalLM",
        partial(_text, SHORT),
        {
            "jamba": GROUPED
            | {
                "num_hidden_layers": 2,
                "num_experts": 4,
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "use_mamba_kernels": False,
            }
            | {"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8},
            "recurrent_gemma": GROUPED | {"lru_width": 64, "attention_window_size": 32, "num_hidden_layers": 3},
            "bamba": GROUPED
            | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
            | {"attn_layer_indices": [1], "num_hidden_layers": 2, "mamba_chunk_size": 16},
        },
    ),
    (
        "AutoModelForCausalLM",
        partial(_unmasked, SHORT),
        {
            "mamba": TEXT | {"state_size": 8, "num_hidden_layers": 2},
            "mamba2": TEXT
            | {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16}
            | {"num_hidden_layers": 2},
            "rwkv": TEXT | {"attention_hidden_size": 64, "context_length": 128, "num_hidden_layers": 2},
        },
    ),
    (
        "AutoModelForCausalLM",
        _unmasked,
        {"xlnet": {"vocab_size": 128, "d_model": 64, "n_layer": 4, "n_head": 4, "d_inner": 128}},
    ),
    ("LlamaForCausalLM", _unlabelled, {"llama": GROUPED}),
    (
        "AutoModelForMaskedLM",
        _text,
        {
            **dict.fromkeys(["bert", "roberta", "electra", "deberta", "deberta-v2", "mpnet", "convbert", "esm"], TEXT),
            **dict.fromkeys(["roformer", "nystromformer", "modernbert", "ibert", "layoutlm", "camembert"], TEXT),
            "squeezebert": TEXT | {"embedding_size": 64},
            "albert": TEXT | {"embedding_size": 32},
            "rembert": TEXT | {"input_embedding_size": 32, "output_embedding_size": 64},
            "distilbert": TEXT | {"dim": 64, "hidden_dim": 128, "n_layers": 4, "n_heads": 4},
            "mobilebert": TEXT | {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
            "funnel": {"vocab_size": 128, "block_sizes": [2, 2], "d_model": 64, "n_head": 4, "d_head": 16}
            | {"d_inner": 128},
            "longformer": TEXT | {"attention_window": 16},
            "xlm": {"vocab_size": 128, "n_words": 128, "emb_dim": 64, "n_layers": 4, "n_heads": 4},
        },
    ),
    ("AutoModelForMaskedLM", _unmasked, {"fnet": TEXT, "big_bird": TEXT | {"attention_type": "original_full"}}),
    ("AutoModelForSequenceClassification", _classes, {"bert": TEXT}),
    (
        "AutoModelForSeq2SeqLM",
        _pairs,
        {
            **dict.fromkeys(["bart", "mbart", "pegasus", "marian", "blenderbot", "m2m_100"], SEQ2SEQ),
            **dict.fromkeys(["t5", "mt5", "longt5"], T5),
            "switch_transformers": T5
            | {"num_experts": 4, "num_sparse_encoder_layers": 1}
            | {"num_sparse_decoder_layers": 1},
        },
    ),
    (
        "AutoModelForImageClassification",
        _images,
        {
            **dict.fromkeys(["vit", "beit", "dinov2", "ijepa"], VISION),
            **dict.fromkeys(["convnextv2", "resnet", "regnet", "poolformer"], STAGES),
            "convnext": STAGES,
            "bit": STAGES | {"embedding_size": 32, "hidden_sizes": [32, 64, 64, 128], "num_groups": 8},
            "pvt": STAGES | {"num_attention_heads": [1, 2, 3, 4]},
            "focalnet": STAGES | {"embed_dim": 16},
            "swin": {"image_size": 64, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
            | {"window_size": 4},
            "swinv2": {"image_size": 64, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
            | {"window_size": 4},
            "segformer": {
                "depths": [1, 1, 1, 1],
                "hidden_sizes": [16, 32, 48, 64],
                "num_attention_heads": [1, 2, 2, 4],
            },
            "mobilenet_v2": {},
            "mobilevit": {"image_size": 64},
        },
    ),
    ("DeiTForImageClassificationWithTeacher", _pixels, {"deit": VISION}),
    (
        "AutoModel",
        _waves,
        dict.fromkeys(["wav2vec2", "hubert", "wavlm", "sew", "unispeech", "data2vec-audio"], WAVES),
    ),
    (
        "WhisperForConditionalGeneration",
        lambda: ((), {"input_features": torch.randn(4, 16, 128), "labels": tokens(4, 32)}),
        {"whisper": SEQ2SEQ | {"num_mel_bins": 16, "max_source_positions": 64, "max_target_positions": 64}},
    ),
    (
        "AutoModelForAudioClassification",
        lambda: ((), {"input_values": torch.randn(4, 128, 16), "labels": torch.randint(0, 2, (4,))}),
        {"audio-spectrogram-transformer": TEXT | {"max_length": 128, "num_mel_bins": 16, "patch_size": 8}},
    ),
    (
        "AutoModel",
        _pictures_with_text,
        {
            name: {"text_config": TEXT | {"projection_dim": 32}, "vision_config": VISION, "projection_dim": 32}
            for name in ("clip", "siglip")
        },
    ),
)


def _build(model: str, kind: str, options: dict[str, Any]) -> nn.Module:
    library = importlib.import_module("transformers")
    config = library.AutoConfig.for_model(kind, **options)
    entry = getattr(library, model)
    return (entry.from_config(config) if model.startswith("Auto") else entry(config)).train()


def _name(kind: str, model: str) -> str:
    return f"{kind} ({model.removeprefix('AutoModel')})" if model != "AutoModel" else kind


TRANSFORMERS = tuple(
    Architecture(
        "transformers", f"{kind} ({model.removeprefix('AutoModel')})", partial(_build, model, kind, options), f
    )
    for model, f, configurations in _TABLE
    for kind, options in configurations.items()
)
