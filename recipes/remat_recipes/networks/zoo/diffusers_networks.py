"""diffusers: autoencoders, U-Nets and transformers of tiny configurations."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .architecture import Architecture

BLOCKS = {"block_out_channels": (16, 32), "norm_num_groups": 4, "sample_size": 32}
U_NET = BLOCKS | {"layers_per_block": 1}
CONDITIONED = U_NET | {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}
ENCODED = BLOCKS | {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
}
HEADS = {"num_layers": 3, "attention_head_dim": 8, "num_attention_heads": 4}


def _noise(*shape: int, **others: Callable[[], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A sample first, and the step of the diffusion, by name with what else the model takes."""
    return (torch.randn(shape),), {name: make() for name, make in others.items()}


def _steps() -> Tensor:
    return torch.randint(0, 900, (2,))


def _words() -> Tensor:
    return torch.randn(2, 12, 32)


_TABLE: dict[str, tuple[dict[str, Any], Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "AutoencoderKL": (ENCODED, partial(_noise, 2, 3, 32, 32)),
    "AutoencoderTiny": (
        {"encoder_block_out_channels": (16,) * 3, "decoder_block_out_channels": (16,) * 3}
        | {"num_encoder_blocks": (1, 2, 2), "num_decoder_blocks": (2, 2, 1)},
        partial(_noise, 2, 3, 64, 64),
    ),
    "VQModel": (
        {k: v for k, v in ENCODED.items() if k != "latent_channels"} | {"latent_channels": 4, "num_vq_embeddings": 32},
        partial(_noise, 2, 3, 32, 32),
    ),
    "UNet2DModel": (
        U_NET
        | {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
        | {"attention_head_dim": 8},
        partial(_noise, 2, 3, 32, 32, timestep=_steps),
    ),
    "UNet2DConditionModel": (
        CONDITIONED | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        partial(_noise, 2, 4, 32, 32, timestep=_steps, encoder_hidden_states=_words),
    ),
    "UNet3DConditionModel": (
        U_NET
        | {"down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "cross_attention_dim": 32}
        | {"up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "attention_head_dim": 8},
        partial(_noise, 2, 4, 4, 16, 16, timestep=_steps, encoder_hidden_states=_words),
    ),
    "ControlNetModel": (
        {k: v for k, v in CONDITIONED.items() if k != "sample_size"} | {"conditioning_embedding_out_channels": (8, 16)},
        partial(
            _noise,
            *(2, 4, 16, 16),
            timestep=_steps,
            encoder_hidden_states=_words,
            controlnet_cond=lambda: torch.randn(2, 3, 32, 32),
        ),
    ),
    "UVit2DModel": (
        {"hidden_size": 32, "encoder_hidden_size": 32, "cond_embed_dim": 32, "micro_cond_encode_dim": 8}
        | {"micro_cond_embed_dim": 40, "block_out_channels": 32, "vocab_size": 64, "codebook_size": 32}
        | {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "block_num_heads": 4}
        | {"num_res_blocks": 1, "hidden_dropout": 0.1},
        lambda: (
            (torch.randint(0, 32, (2, 16, 16)),),
            {"encoder_hidden_states": _words(), "pooled_text_emb": torch.randn(2, 32), "micro_conds": torch.ones(2, 5)},
        ),
    ),
    "DiTTransformer2DModel": (
        HEADS | {"in_channels": 4, "sample_size": 16, "norm_num_groups": 4, "num_embeds_ada_norm": 1000},
        partial(_noise, 2, 4, 16, 16, timestep=_steps, class_labels=_steps),
    ),
    "PixArtTransformer2DModel": (
        HEADS
        | {"sample_size": 16, "caption_channels": 32, "cross_attention_dim": 32, "norm_num_groups": 4}
        | {"use_additional_conditions": False},
        partial(
            _noise,
            *(2, 4, 16, 16),
            timestep=_steps,
            encoder_hidden_states=_words,
            added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None},
        ),
    ),
    "Transformer2DModel": (
        HEADS | {"in_channels": 16, "norm_num_groups": 4, "cross_attention_dim": 32},
        partial(_noise, 2, 16, 16, 16, encoder_hidden_states=_words),
    ),
    "SD3Transformer2DModel": (
        HEADS
        | {"sample_size": 16, "in_channels": 4, "joint_attention_dim": 32, "caption_projection_dim": 32}
        | {"pooled_projection_dim": 32, "out_channels": 4, "pos_embed_max_size": 16},
        partial(
            _noise,
            *(2, 4, 16, 16),
            timestep=_steps,
            encoder_hidden_states=_words,
            pooled_projections=lambda: torch.randn(2, 32),
        ),
    ),
    "FluxTransformer2DModel": (
        {"in_channels": 4, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16}
        | {
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8),
        },
        partial(
            _noise,
            *(2, 64, 4),
            timestep=lambda: torch.rand(2),
            encoder_hidden_states=_words,
            pooled_projections=lambda: torch.randn(2, 32),
            img_ids=lambda: torch.zeros(64, 3),
            txt_ids=lambda: torch.zeros(12, 3),
        ),
    ),
    "SanaTransformer2DModel": (
        HEADS
        | {"in_channels": 4, "out_channels": 4, "sample_size": 16, "caption_channels": 32}
        | {"cross_attention_dim": 32, "num_cross_attention_heads": 4, "cross_attention_head_dim": 8},
        partial(_noise, 2, 4, 16, 16, timestep=_steps, encoder_hidden_states=_words),
    ),
    "WanTransformer3DModel": (
        HEADS
        | {"attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 16}
        | {"ffn_dim": 64},
        partial(_noise, 2, 4, 4, 16, 16, timestep=_steps, encoder_hidden_states=_words),
    ),
}


def _build(name: str, options: dict[str, Any]) -> nn.Module:
    return getattr(importlib.import_module("diffusers"), name)(**options).train()


DIFFUSERS = tuple(
    Architecture("diffusers", name, partial(_build, name, options), arguments)
    for name, (options, arguments) in _TABLE.items()
)
