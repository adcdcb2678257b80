"""Inputs as people write them: `96x3x224x224`, `Bx1024:int64`."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from .usage_error import UsageError

_INPUT = re.compile(r"(B|\d+)((?:x\d+)*)(?::(\w+))?")
_TYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
}


@dataclass(frozen=True, slots=True)
class InputShape:
    """One input of the model.

    Attributes:
        batch_size: Its first dimension; None where the largest one is asked for.
        rest: The other dimensions.
        dtype: The type of its numbers; None where it is left to the model (tokens for a language model, else float32).
    """

    batch_size: int | None
    rest: tuple[int, ...]
    dtype: torch.dtype | None = None

    @classmethod
    def parse(cls, text: str) -> InputShape:
        """The shape that the text stands for.

        >>> InputShape.parse("Bx3x224x224")
        InputShape(batch_size=None, rest=(3, 224, 224), dtype=None)

        Raises:
            UsageError: It stands for none.
        """
        match = _INPUT.fullmatch(text.strip().replace("×", "x").replace(",", "x"))
        if match is None:
            raise UsageError(
                f"--input is {text!r}, expected sizes such as 96x3x224x224, Bx3x224x224 (B: the batch size is asked "
                "for) or Bx1024:int64 (tokens)"
            )
        first, rest, name = match.groups()
        sizes = tuple(int(size) for size in rest.split("x") if size)
        if 0 in sizes or first == "0":
            raise UsageError(f"--input is {text!r}: every size must be at least 1")
        if name is not None and name not in _TYPES:
            raise UsageError(f"--input is {text!r}: no type {name!r}; the types are {', '.join(_TYPES)}")
        return cls(None if first == "B" else int(first), sizes, None if name is None else _TYPES[name])

    def tensor(self, batch_size: int, default: torch.dtype) -> Tensor:
        """An input of that many samples."""
        return torch.zeros((self.batch_size or batch_size, *self.rest), dtype=self.dtype or default)
