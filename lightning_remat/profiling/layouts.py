"""How the gradients of operations lie in memory: a transposed one is copied by many a backward, which takes memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils.hooks import RemovableHandle

from ..capture.aliasing import fake_values
from ..operations.contexts import ContextStack, common_contexts
from ..operations.evaluation import Run, compile_constant, compile_operation, effect_outputs, slots
from ..operations.operation import TracedModule
from ..operations.saved_tensors import tensors_of

logger = logging.getLogger(__name__)

Layouts = dict[int, dict[int, tuple[int, ...]]]
"""Operation → number of a tensor among those with gradients in its output → strides of that gradient."""


def gradient_layouts(traced: TracedModule, values: list[Any], *, with_gaps: bool = False) -> Layouts:
    """The strides of the gradients that a step brings to operations in another order than their tensors' own.

    Found by a step on fake tensors, where nothing is computed; only made if the forward permutes dimensions, as
    otherwise no gradient comes permuted. Gradients with repeated elements are left out.

    Args:
        traced: The operations.
        values: Of the placeholders, real or fake.
        with_gaps: Whether those that are parts of a larger one, of a concatenation, are told, too.
    """
    if not with_gaps and not any(operation.is_permuted for operation in traced.operations):
        return {}
    try:
        # Who looks for anomalies looks at values.
        with ExitStack() as hooks, fake_values(values) as fakes, torch.autograd.set_detect_anomaly(False):
            return _layouts(traced, fakes, hooks, with_gaps=with_gaps)
    except Exception as error:  # code that needs values
        logger.info("gradients of %s are taken to lie in order: %s", type(traced.module).__name__, error)
        return {}


def _layouts(traced: TracedModule, given: list[Any], hooks: ExitStack, *, with_gaps: bool) -> Layouts:
    found: Layouts = {}

    def note(n: int, k: int, strides: tuple[int, ...], gradient: Tensor) -> None:
        is_told = is_dense(gradient) or (with_gaps and all(gradient.stride()))
        if gradient.stride() != strides and is_told:
            found.setdefault(n, {})[k] = gradient.stride()

    slot_of = slots(traced)
    values: dict[int, Any] = dict(enumerate(given)) | {slot_of[n]: v for n, v in traced.fetched().items()}
    pending = [(c, compile_constant(c, slot_of)) for c in traced.constants]
    for n, operation in enumerate(traced.operations):
        waiting: list[tuple[fx.Node, Run]] = []
        for constant, run in pending:  # operations run in another order than that of the graph
            if all(slot_of[i] in values for i in constant.all_input_nodes):
                (values[slot_of[constant]],) = run(values)
            else:
                waiting.append((constant, run))
        pending = waiting
        with ContextStack() as contexts:
            contexts.enter(common_contexts(operation.parts))
            made = compile_operation(operation, slot_of, is_first=True)(values)
        outputs = made[: len(operation.outputs)]
        for part, value in zip((*operation.outputs, *effect_outputs(operation)), made, strict=True):
            values[slot_of[part]] = value
        for k, t in enumerate(t for t in tensors_of(outputs) if t.requires_grad):
            # Of a view that was written PyTorch makes the node when it is asked for it, and crashes at hooks before.
            _ = t.grad_fn
            hook: Callable[[Tensor], None] = partial(note, n, k, t.stride())
            handle = cast(RemovableHandle, t.register_hook(hook))  # pyright: ignore[reportUnknownMemberType]
            hooks.callback(handle.remove)  # the tensor may be a parameter that an operation returns
    returned = traced.output_node.all_input_nodes
    leaving = [t for t in tensors_of(values[slot_of[n]] for n in returned) if t.requires_grad]
    sources = [t for t in tensors_of(given) if t.requires_grad]
    if leaving and sources:
        torch.autograd.grad(leaving, sources, [torch.ones_like(t) for t in leaving], allow_unused=True)
    return found


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
