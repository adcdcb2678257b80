"""Compares a step by a plan with the plain one, bit by bit, and names the first operation that differs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..execution.rewriter import Rewriting, watched
from ..measure.out_of_memory import is_out_of_memory
from ..module_state.agreement import all_ranks
from ..module_state.random_state import preserved_random
from ..module_state.sharding import local_part
from ..operations.saved_tensors import tensors_of

Outcome = Mapping[str, Tensor]
"""What a step produces, by name: losses or outputs, gradients, buffers, random states."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What a planned step does otherwise than the plain one.

    Attributes:
        what: The first result that differs, or the error that only the planned step raises.
        node: The first operation whose recomputation makes something else than its first run; None if none does.
    """

    what: str
    node: str | None

    def __str__(self) -> str:
        where = "every operation repeats itself"
        if self.node is not None:
            where = f"first differing node {self.node!r}: its recomputation makes something else than its first run"
        return f"a planned step differs from the plain one in its {self.what} ({where})"


def find_difference(module: nn.Module, run: Callable[[], Outcome], *, num_steps: int = 3) -> Difference | None:
    """What steps by the module's plan do otherwise than plain steps; None if nothing. The plan stays installed.

    Args:
        module: Rewritten, as a whole or in parts.
        run: Runs one step and undoes it, random states included.
        num_steps: How many steps are compared, each with random numbers of its own.
    """
    for seed in range(num_steps):
        with preserved_random():
            if seed:
                torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
            difference = _difference_in_step(module, run)
        # No process goes on with steps that another one does not run.
        found = [d for d in (difference, *all_ranks(module, difference)) if d is not None]
        if found:
            return found[0]
    return None


def _difference_in_step(module: nn.Module, run: Callable[[], Outcome]) -> Difference | None:
    watch = RunWatch()
    planned: Outcome = {}
    error: Exception | None = None
    try:
        with watched(module, watch):
            planned = run()
    except Exception as failure:
        if is_out_of_memory(failure):
            raise
        error = failure
    try:
        with Rewriting(module).suspended():
            plain = run()
    except Exception as failure:
        if is_out_of_memory(failure):
            return None  # what does not fit cannot be compared with
        raise
    if error is not None:
        what = f"course: {type(error).__name__}: {error}"
    else:
        what = next((name for name in {**plain, **planned} if not _same(plain.get(name), planned.get(name))), None)
    if what is None:
        return None
    return Difference(what, watch.unlike[0] if watch.unlike else None)


class RunWatch:
    """Notes what each operation of a program makes, and those that make something else when run again.

    Attributes:
        unlike: The names of the operations that did not repeat themselves, in the order of their recomputations.
    """

    def __init__(self) -> None:
        self.unlike: list[str] = []
        self._first: dict[str, list[list[bytes]]] = {}

    def ended(self, name: str, made: list[Any], *, is_first: bool) -> None:
        """An operation has run, for the first time or again.

        Args:
            name: That of the operation, which several calls of a module have in common.
            made: Its outputs.
            is_first: Whether this is no recomputation.
        """
        prints = [fingerprint(t) for t in tensors_of(made)]
        if is_first:
            self._first.setdefault(name, []).append(prints)
        elif prints not in self._first.get(name, ()):
            self.unlike.append(name)


def fingerprint(tensor: Tensor) -> bytes:
    """A hash of the bits of a tensor's values, its shape and its type."""
    with torch.no_grad(), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
        data = dense.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).cpu()
        head = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
        return hashlib.blake2b(data.numpy().tobytes(), key=head[:64], digest_size=16).digest()


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    a, b = local_part(a), local_part(b)
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
