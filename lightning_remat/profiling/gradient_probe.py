"""Runs the backward of one operation alone, with a gradient that autograd owns, as in a real step."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..measure.meter import tensor_storage
from ..measure.tensor_bytes import logical_bytes
from ..operations.saved_tensors import Geometry, geometry_of, tensor_in
from .accumulation import copied_as_accumulated, hooked
from .layouts import is_dense


class SavedStore:
    """Saved tensors of one run, each released when its backward has read it."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._released: dict[int, tuple[weakref.ref[torch.UntypedStorage], torch.dtype, Geometry]] = {}
        self._held: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> int:
        """Keeps a tensor; returns its number."""
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def hand_over(self) -> None:
        """From here on each tensor lives until it is read."""
        self._held = {k: t.detach() for k, t in enumerate(self.tensors)}
        self.tensors = []

    def unpack(self, number: int) -> Tensor:
        """The tensor; a second read succeeds while the first reader still holds it."""
        if self.tensors:
            return self.tensors[number]
        if number in self._held:
            tensor = self._held.pop(number)
            storage = tensor_storage(tensor)
            if storage is not None:
                self._released[number] = (weakref.ref(storage), tensor.dtype, geometry_of(tensor))
            return tensor
        reference, dtype, geometry = self._released[number]
        storage = reference()
        if storage is None:
            raise RuntimeError("a backward reads a saved tensor again after letting go of it")
        return tensor_in(storage, dtype, geometry)


class _Source(torch.autograd.Function):
    """Passes values on; its backward makes the gradient that the operations below then own alone."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Tensor,
        strides: tuple[int, ...] | None,
        part: Tensor | None,
        made: list[weakref.ref[torch.UntypedStorage]],
        held: list[Tensor] | None,
    ) -> Tensor:
        ctx.like, ctx.strides, ctx.part, ctx.made, ctx.held = x.detach(), strides, part, made, held
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.part is not None:
            gradient = ctx.part
        elif ctx.strides is None:
            gradient = torch.ones_like(ctx.like)
        else:
            gradient = ctx.like.new_empty_strided(ctx.like.size(), ctx.strides).fill_(1)
        ctx.like = None  # the output may end here, where the operation's backward reads it last
        storage = tensor_storage(gradient)
        if storage is not None:
            ctx.made.append(weakref.ref(storage))
        if ctx.held is not None:
            ctx.held.append(gradient)
        return gradient, None, None, None, None


class GradientProbe:
    """The backward of some outputs, prepared so that running it is all that is left to do.

    Args:
        outputs: Those without gradients are left out.
        targets: What to differentiate by.
        holds: Whether the outputs' gradients stay until the probe dies, as those do that others hold too.
        strides: Those of the outputs' gradients that do not lie in memory as the outputs do, by the number of the
            output among those with gradients.
        leaves: Those of the targets of which the step adds the gradients to `.grad`.
        adding: Those of them whose gradients go as soon as they are made, added to what the backward of another
            operation made.

    Attributes:
        gradients: For each target, its gradient or None, once run.
        part_bytes: Of the outputs' gradients that are parts of larger ones, which are there before and stay.
        passed_on: For each target, whether its gradient lives in the memory of the outputs' gradient.
    """

    def __init__(
        self,
        outputs: list[Tensor],
        targets: list[Tensor],
        *,
        holds: bool = False,
        strides: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
        leaves: Iterable[Tensor] = (),
        adding: Collection[Tensor] = (),
    ) -> None:
        self._made: list[weakref.ref[torch.UntypedStorage]] = []
        self._targets = targets
        self._held: list[Tensor] | None = [] if holds else None
        differentiable = [t for t in outputs if t.requires_grad]
        parts = [_part(t, strides.get(k)) for k, t in enumerate(differentiable)]
        self.part_bytes = logical_bytes(part for part in parts if part is not None)
        sources: list[Tensor] = [
            _Source.apply(t, strides.get(k), part, self._made, self._held)
            for k, (t, part) in enumerate(zip(differentiable, parts, strict=True))
        ]
        self._seeds = [t.detach().new_zeros(()).expand(t.shape) for t in sources]
        self._roots = [get_gradient_edge(t) for t in sources]  # unlike the tensors they hold no memory
        self._leaves = [t for t in leaves if all(t is not other for other in adding)]
        self._adding = [(t, t.detach().new_zeros(()).expand(t.shape)) for t in adding]
        self.gradients: list[Tensor | None] = []

    def run(self) -> None:
        """Runs the backward, once."""
        with ExitStack() as hooks:
            for t, nothing in self._adding:
                hooks.enter_context(hooked(t, partial(_exchange, nothing)))
            hooks.enter_context(copied_as_accumulated(self._leaves))
            found = torch.autograd.grad(self._roots, self._targets, self._seeds, allow_unused=True)
        self._roots.clear()
        self.gradients = list(found)

    @property
    def passed_on(self) -> list[bool]:
        made = [storage for reference in self._made if (storage := reference()) is not None]
        storages = [None if g is None else tensor_storage(g) for g in self.gradients]
        return [any(s is m for m in made) for s in storages]


def _part(output: Tensor, strides: tuple[int, ...] | None) -> Tensor | None:
    """A gradient that has gaps because it is part of a larger one; None for others."""
    if strides is None or is_dense(part := output.detach().new_empty_strided(output.size(), strides)):
        return None
    return part.fill_(1)


def _exchange(nothing: Tensor, _gradient: Tensor) -> Tensor:
    """What autograd returns instead of a gradient, which then is gone as if it were added elsewhere."""
    return nothing


def has_several_backwards(outputs: Iterable[Tensor]) -> bool:
    """Whether more than one operation lies between the outputs and what they were made from."""
    functions = [t.grad_fn for t in outputs if t.grad_fn is not None]
    return any(below.next_functions for f in functions for below, _ in f.next_functions if below is not None)
