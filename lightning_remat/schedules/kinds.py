"""Families of operations, by the kind that a `Node` names."""

from __future__ import annotations

from collections.abc import Set

from .graph import Node

ELEMENTWISE = frozenset([
    "relu", "relu_", "relu6", "leaky_relu", "elu", "selu", "celu", "sigmoid", "tanh", "silu", "gelu", "mish",
    "softplus", "hardswish", "hardsigmoid", "hardtanh", "dropout", "add", "add_", "iadd", "sub", "mul", "div",
    "neg", "scale",
])  # fmt: skip
"""Operations element by element: their result may be written over an operand, and so in the backward."""

CHEAP = ELEMENTWISE | frozenset([
    "batch_norm", "layer_norm", "group_norm", "instance_norm", "local_response_norm", "rms_norm", "normalize",
    "prelu", "softmax", "log_softmax", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d",
    "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d",
    "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "stochastic_depth", "mul_", "imul", "isub", "mean",
    "sum", "cat", "stack", "pad", "interpolate", "upsample", "pixel_shuffle", "permute", "contiguous", "flatten",
    "reshape", "view", "transpose", "identity", "synchronized_batch_norm",
])  # fmt: skip
"""Operations whose time is that of reading and writing memory, not of arithmetic."""


def consists_of(node: Node, kinds: Set[str]) -> bool:
    """Whether all parts of the operation, of which a fused one has several, are of these kinds."""
    return set(node.kind.split("+")) <= kinds
