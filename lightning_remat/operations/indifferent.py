"""Calls that compute the same bits whether autograd records them or not."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from .contexts import contexts_of

# Python's operators have no types of their own.
# pyright: reportUnknownMemberType=false

_FUNCTIONS = frozenset[Any](
    {
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow, operator.getitem),
        *(torch.add, torch.sub, torch.mul, torch.div, torch.neg, torch.pow, torch.abs, torch.square),
        *(torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.sin, torch.cos, torch.erf, torch.where),
        *(torch.sigmoid, torch.tanh, torch.relu, torch.softmax, torch.clamp, torch.mean, torch.sum),
        *(torch.mm, torch.bmm, torch.addmm, torch.baddbmm),
        *(torch.cat, torch.stack, torch.chunk, torch.split, torch.unbind, torch.flatten, torch.reshape),
        *(torch.permute, torch.transpose, torch.unsqueeze, torch.squeeze),
        *(functional.gelu, functional.softmax, functional.layer_norm, functional.group_norm),
        *(torch.lstm_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell),
        *(torch.zeros, torch.ones, torch.full, torch.arange, torch.zeros_like, torch.ones_like, torch.full_like),
    }
)

_METHODS = frozenset(
    {
        *("add", "sub", "mul", "div", "neg", "pow", "abs", "square", "exp", "log", "sqrt", "rsqrt", "sin", "cos"),
        *("sigmoid", "tanh", "relu", "softmax", "clamp", "mean", "sum", "mm", "bmm", "float", "half", "bfloat16"),
        *("chunk", "split", "unbind", "flatten", "reshape", "view", "permute", "transpose", "t", "unsqueeze"),
        *("squeeze", "expand", "contiguous", "new_zeros", "new_ones", "new_full"),
    }
)


_LINEAR_ASKS = torch.__version__ < "2.14"
"""Whether a linear layer whose input is no dense matrix takes another kernel where gradients are asked for."""


def is_indifferent(part: fx.Node) -> bool:
    """Whether no implementation of a call asks for gradients; of functions that are not listed it is not known.

    Among those that do ask are convolutions, attention, GRU cells, and products of more than two dimensions.
    """
    if contexts_of(part):
        return False
    if part.op == "call_method":
        return part.target in _METHODS
    if part.target in (functional.relu, functional.silu):
        return not (part.kwargs.get("inplace") or part.args[1:])
    if part.target is functional.linear:  # without a bias it is such a product
        return not _LINEAR_ASKS and len(part.args) == 3 and isinstance(part.args[2], fx.Node)
    if part.target is functional.dropout:
        return _is_idle_dropout(part)
    if part.target is functional.embedding:  # with a largest norm it writes the weight
        return "max_norm" not in part.kwargs and part.args[3:4] in ((), (None,))
    return part.op == "call_function" and part.target in _FUNCTIONS and "out" not in part.kwargs


def _is_idle_dropout(part: fx.Node) -> bool:
    """Whether a call of dropout hands over what it gets."""
    given = dict(zip(("p", "training", "inplace"), part.args[1:], strict=False)) | part.kwargs
    is_idle = given.get("p", 0.5) == 0 or given.get("training", True) is False
    return bool(is_idle) and not given.get("inplace", False)
