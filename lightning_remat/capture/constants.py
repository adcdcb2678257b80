"""Tensors that a forward makes from constants alone, such as a table of positions, as operations of a trace."""

from __future__ import annotations

from torch import Tensor


class TensorConstant:
    """A tensor that is the same in every call.

    Attributes:
        tensor: As the trace met it; never written.
        version: Its version counter then.
        is_made: Whether the forward made it, by a factory of torch; else it is somebody's.
        is_copied: Whether every call gets a copy, because it writes into it.
    """

    __name__ = "constant"

    def __init__(self, tensor: Tensor, *, is_made: bool) -> None:
        self.tensor, self.version, self.is_made = tensor, tensor._version, is_made
        self.is_copied = False

    def __call__(self) -> Tensor:
        return self.copy() if self.is_copied else self.tensor

    def copy(self) -> Tensor:
        """What the forward would make anew."""
        return self.tensor.detach().clone()
