"""timm: the smallest network of each of its families, which are the files of `timm.models`."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from torch import nn

from .architecture import Architecture, images

NAMES = (
    "beit_base_patch16_224 lambda_resnet26t test_byobnet cait_xxs24_224 coat_lite_tiny convit_tiny convmixer_768_32 "
    "test_convnext cpubone_nano crossvit_tiny_240 csatv2 cs3darknet_s cspnext_tiny davit_tiny deepseek_vit_412m "
    "deit_tiny_distilled_patch16_224 densenet121 dla34 dpn48b edgenext_xx_small efficientformer_l1 "
    "efficientformerv2_s0 test_efficientnet efficientvim_m1 efficientvit_b0 efficientvit_m0 eva02_tiny_patch14_224 "
    "fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny gemma4_vit_167m ghostnet_050 hardcorenas_b hgnetv2_b0 "
    "hiera_tiny_224 hieradet_small hrnet_w18_small iformer_t inception_next_atto inception_resnet_v2 inception_v3 "
    "inception_v4 lcnetv2_small levit_128s lowformer_b0 test_mambaout test_coatnet poolformer_s12 gmlp_ti16_224 "
    "mobilenetv3_small_050 mobilenetv5_base mobilevit_xxs mvitv2_tiny naflexvit_base_patch16_siglip nasnetalarge "
    "nest_tiny nextvit_small test_nfnet pit_ti_224 pnasnet5large pvt_v2_b0 qwen3_vit_88m rdnet_tiny regnety_004 "
    "repghostnet_050 repvit_m1 res2net50_26w_4s resnest14d test_resnet resnetv2_18 rexnet_100 selecsls42 "
    "legacy_seresnet18 sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 "
    "swinv2_cr_tiny_ns_224 swinv2_tiny_window8_256 tiny_vit_5m_224 tnt_s_legacy_patch16_224 tresnet_m twins_svt_small "
    "vgg11_bn visformer_tiny test_vit vit_tiny_r_s16_p8_224 test_vit_relpos samvit_base_patch16_224 vitamin_small_224 "
    "volo_d1_224 ese_vovnet19b_slim_dw legacy_xception xception41 xcit_nano_12_p16_224 mixer_s32_224"
)

_FOUR = {"depth": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {"depth": 4, "embed_dim": 192, "num_heads": 3},
    "deepseek_vit_412m": _FOUR,
    "gemma4_vit_167m": _FOUR,
    "naflexvit_base_patch16_siglip": {"depth": 4, "embed_dim": 192, "num_heads": 3},
    "qwen3_vit_88m": _FOUR,
    "samvit_base_patch16_224": {"depth": 4, "embed_dim": 192, "num_heads": 3, "global_attn_indexes": (1, 3)},
}
EXTENTS = {"deepseek_vit_412m": 126, "lambda_resnet26t": 128, "hieradet_small": 224, "nasnetalarge": 128}
"""Where it is neither fixed nor 96."""


def _build(name: str) -> nn.Module:
    return importlib.import_module("timm").create_model(name, pretrained=False, **OPTIONS.get(name, {})).train()


def _arguments(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    default = importlib.import_module("timm").get_pretrained_cfg(name)
    extent = default.input_size[-1] if default.fixed_input_size else EXTENTS.get(name, 96)
    return (images(2, extent),), {}


TIMM = tuple(Architecture("timm", name, partial(_build, name), partial(_arguments, name)) for name in NAMES.split())
