"""How the gradients of operations lie in memory: a transposed one is copied by many a backward, which takes memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

from ..capture.recording import fake_copies
from ..capture.tracer import TracedModule
from ..operations.evaluation import call, evaluate
from ..operations.saved_tensors import tensors_of

logger = logging.getLogger(__name__)

Layouts = dict[int, dict[int, tuple[int, ...]]]
"""Operation → number of a tensor among those with gradients in its output → strides of that gradient."""


def gradient_layouts(traced: TracedModule, tensors: list[Tensor]) -> Layouts:
    """The strides of the gradients that a step brings to operations in another order than their tensors' own.

    Found by a step on fake tensors, where nothing is computed; only made if the forward permutes dimensions, as
    otherwise no gradient comes permuted. Gradients with gaps or repeated elements are left out: parts of a larger one.

    Args:
        traced: The module, on whose parameters no gradients are left.
        tensors: Values of its placeholders, real or fake.
    """
    if not any(operation.is_permuted for operation in traced.operations):
        return {}
    is_fake = any(isinstance(t, FakeTensor) for t in tensors)
    try:
        with ExitStack() as hooks, nullcontext(tensors) if is_fake else fake_copies(traced.module, tensors) as fakes:
            return _layouts(traced, fakes, hooks)
    except Exception as error:  # code that needs values, as in `record`
        logger.info("gradients of %s are taken to lie in order: %s", type(traced.module).__name__, error)
        return {}


def _layouts(traced: TracedModule, tensors: list[Tensor], hooks: ExitStack) -> Layouts:
    found: Layouts = {}

    def note(n: int, k: int, strides: tuple[int, ...], gradient: Tensor) -> None:
        if gradient.stride() != strides and _is_dense(gradient):
            found.setdefault(n, {})[k] = gradient.stride()

    places = [n for n in traced.fx_graph.nodes if n.op == "placeholder"]
    values: dict[fx.Node, Any] = dict(zip(places, tensors, strict=True))
    pending = list(traced.constants)
    for n, operation in enumerate(traced.operations):
        while pending and all(i in values or i.op == "get_attr" for i in pending[0].all_input_nodes):
            constant = pending.pop(0)
            values[constant] = call(traced.module, constant, values.__getitem__, is_first=False)
        outputs = evaluate(traced.module, operation, values.__getitem__, is_first=False)
        values.update(zip(operation.outputs, outputs, strict=True))
        for k, t in enumerate(t for t in tensors_of(outputs) if t.requires_grad):
            hook: Callable[[Tensor], None] = partial(note, n, k, t.stride())
            handle = cast(RemovableHandle, t.register_hook(hook))  # pyright: ignore[reportUnknownMemberType]
            hooks.callback(handle.remove)  # the tensor may be a parameter that an operation returns
    returned = next(n for n in traced.fx_graph.nodes if n.op == "output").all_input_nodes
    leaving = [t for t in tensors_of(values[n] for n in returned) if t.requires_grad]
    sources = [t for t in (*traced.module.parameters(), *tensors) if t.requires_grad]
    if leaving and sources:
        torch.autograd.grad(leaving, sources, [torch.ones_like(t) for t in leaving], allow_unused=True)
    return found


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
