"""How backwards tell that they begin: by hooks of autograd, which hold no execution longer than something rests."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..capture.never_captured import never_captured
from .executor import Execution


class Keeper:
    """By which a backward that tells that it begins finds its execution; autograd's graph holds it.

    Attributes:
        execution: While something rests, which nothing else would fill.
        reference: To it, from then on.
    """

    __slots__ = ("__weakref__", "execution", "reference")

    def __init__(self, execution: Execution) -> None:
        self.execution: Execution | None = None
        self.reference = weakref.ref(execution)
        if execution.program.rests:
            self.execution, execution.keeper = execution, weakref.ref(self)

    def hear_of(self, n: int, made: Iterable[Tensor], *, is_output: bool) -> None:
        """The backward of `n` will tell, by the tensors that the operation made.

        Args:
            n: The operation.
            made: Tensors that have a node in autograd's graph.
            is_output: Whether the caller gets them, who may hook them too, or write into them.
        """
        tell = partial(self.arrive_before, n)
        for tensor in made:
            node: Any = tensor.grad_fn
            if is_output or tensor._backward_hooks is not None:  # pyright: ignore
                node.register_prehook(tell)
            else:
                # As `register_hook`, which makes a handle as well, whose numbers are not negative.
                tensor._backward_hooks = OrderedDict({-1: tell})  # pyright: ignore
                node._register_hook_dict(tensor)

    def watch(self, sources: Iterable[Any]) -> None:
        """Backwards that come in by these nodes will tell."""
        for node in sources:
            node.register_prehook(self.enter)

    @never_captured
    def arrive_before(self, n: int, _gradients: Any) -> None:
        """The backward of `n` begins."""
        execution = self.reference()
        if execution is not None:  # else no backward of it reads anything any more
            execution.arrive(n)

    @never_captured
    def enter(self, _gradients: Any) -> None:
        """A backward comes in from outside."""
        if torch.is_grad_enabled() and (execution := self.execution) is not None:  # it is differentiated itself
            execution.fill()
