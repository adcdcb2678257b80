"""torchvision: one network of each family for classification and segmentation; detection and video models."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .architecture import Architecture, images, on_images

CLASSIFICATION = (
    "alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet1_0 "
    "mobilenet_v2 mobilenet_v3_small regnet_y_400mf resnet18 resnext50_32x4d wide_resnet50_2 shufflenet_v2_x1_0 "
    "squeezenet1_1 swin_t swin_v2_t vgg11_bn vit_b_16"
)
SEGMENTATION = "deeplabv3_resnet50 fcn_resnet50 lraspp_mobilenet_v3_large"
DETECTION = (
    "fasterrcnn_mobilenet_v3_large_320_fpn fasterrcnn_resnet50_fpn fasterrcnn_resnet50_fpn_v2 fcos_resnet50_fpn "
    "keypointrcnn_resnet50_fpn maskrcnn_resnet50_fpn retinanet_resnet50_fpn ssd300_vgg16 ssdlite320_mobilenet_v3_large"
)
VIDEO = "mc3_18 mvit_v2_s r2plus1d_18 r3d_18 s3d swin3d_t"

SIZES = {"inception_v3": (2, 299), "maxvit_t": (1, 224), "vit_b_16": (1, 224)}
CLIPS = {"mvit_v2_s": (1, 3, 16, 224, 224), "s3d": (1, 3, 16, 224, 224)}


def _build(name: str, **options: Any) -> nn.Module:
    return importlib.import_module("torchvision").models.get_model(name, weights=None, **options).train()


def _targets(has_masks: bool, has_keypoints: bool) -> dict[str, Tensor]:
    target = {
        "boxes": torch.tensor([[8.0, 8.0, 60.0, 60.0], [20.0, 30.0, 90.0, 100.0]]),
        "labels": torch.tensor([1, 1]),
    }
    target |= {"masks": torch.ones(2, 128, 128, dtype=torch.uint8)} if has_masks else {}
    target |= {"keypoints": torch.tensor([30.0, 40.0, 1.0]).repeat(2, 17, 1)} if has_keypoints else {}
    return target


def _photographs(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    found = [_targets("mask" in name, "keypoint" in name) for _ in range(2)]
    return ((list(images(2, 128)), found), {})


def _clips(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(CLIPS.get(name, (2, 3, 8, 64, 64))),), {}


def _detection(name: str) -> Architecture:
    options: dict[str, Any] = {"weights_backbone": None}
    options |= {} if name.startswith("ssd") else {"min_size": 128, "max_size": 128}
    return Architecture("torchvision", name, partial(_build, name, **options), partial(_photographs, name))


def _classification(name: str) -> Architecture:
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return Architecture("torchvision", name, partial(_build, name, **options), on_images(*SIZES.get(name, (4, 96))))


TORCHVISION = (
    *map(_classification, CLASSIFICATION.split()),
    *(
        Architecture("torchvision", name, partial(_build, name, weights_backbone=None), on_images(2, 64))
        for name in SEGMENTATION.split()
    ),
    *map(_detection, DETECTION.split()),
    *(Architecture("torchvision", name, partial(_build, name), partial(_clips, name)) for name in VIDEO.split()),
)
