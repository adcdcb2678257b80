"""What a module's Python decided by the sizes of its inputs while it was traced, and whether others decide alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..module_state.ambient import Ambient
from .example_values import ExampleValues

logger = logging.getLogger(__name__)

Decision = tuple[fx.Node, Callable[[Any], Any], Any]
"""A node, a question about its value (`bool`, `len`) and the answer that the trace went by."""


def answer(examples: ExampleValues, node: fx.Node, question: Callable[[Any], Any]) -> Any:
    """The answer on the example inputs."""
    value = examples.of(node)
    with unset_fake_temporarily():  # numbers that follow from sizes are real, whatever the mode of the caller
        return question(value)


def call_key(tensors: list[Tensor]) -> Hashable:
    """What decisions may depend on: all of the inputs but their numbers, and autocast."""
    facts = tuple((t.shape, t.dtype, t.device, t.layout, t.requires_grad) for t in tensors)
    types = sorted({"cpu", *(t.device.type for t in tensors)} - {"meta"})
    return facts, Ambient.current(types).autocast, torch.is_grad_enabled()


def decides_alike(module: nn.Module, decisions: tuple[Decision, ...], tensors: list[Tensor]) -> bool:
    """Whether the module's Python would decide on these inputs as it did when traced, so that the trace is theirs.

    Costs a run on fake tensors up to the last decision.
    """
    examples = ExampleValues(module, tensors)
    for node, question, expected in decisions:
        try:
            found = answer(examples, node, question)
        except Exception as error:  # what fails here fails in the plain run too, which then tells the user
            logger.info("%s cannot be decided on these inputs: %s", node, error)
            return False
        if found != expected:
            logger.info("%s of %s is %s, was %s when traced", question.__name__, node, found, expected)
            return False
    return True
