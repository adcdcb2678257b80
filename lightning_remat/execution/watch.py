"""What an executor tells of its runs to whoever checks them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .executor import Step


class Watch(Protocol):
    """Is told of every run of an operation, for a self-check."""

    def enters(self) -> None:
        """A program's forward begins."""

    def leaves(self) -> None:
        """It has ended."""

    def begins(self, step: Step, n: int) -> None:
        """The first run of operation `n` begins."""

    def ended(self, step: Step, n: int, made: list[Any]) -> None:
        """A run of operation `n` has made these outputs and saved tensors."""
