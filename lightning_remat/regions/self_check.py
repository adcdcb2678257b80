"""Compares a step by a plan with the plain one, bit by bit, and names the first operation that differs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..execution.executor import Step
from ..execution.rewriter import Rewriting, watched
from ..measure.out_of_memory import is_out_of_memory
from ..module_state.ambient import is_recomputing
from ..operations.saved_tensors import tensors_of
from .calls import submodules

Outcome = Mapping[str, Tensor]
"""What a step produces, by name: losses or outputs, gradients, buffers, random states."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What a planned step does otherwise than the plain one.

    Attributes:
        what: The first result that differs, or the error that only the planned step raises.
        node: The first operation that differs, in the graph's terms; None where each single one agrees.
        how: In what it differs.
    """

    what: str
    node: str | None
    how: str

    def __str__(self) -> str:
        where = (
            "no single operation differs" if self.node is None else f"first differing node {self.node!r}: {self.how}"
        )
        return f"a planned step differs from the plain one in its {self.what} ({where})"


def find_difference(module: nn.Module, run: Callable[[], Outcome]) -> Difference | None:
    """What a step by the module's plan does otherwise than the plain step; None if nothing. The plan stays installed.

    Args:
        module: Rewritten, as a whole or in parts.
        run: Runs one step and undoes it, random states included.
    """
    watch = RunWatch(module)
    ours, heard = _Listener(watch), _Listener()
    planned: Outcome = {}
    error: Exception | None = None
    try:
        with watched(module, watch), ours:
            planned = run()
    except Exception as failure:
        if is_out_of_memory(failure):
            raise
        error = failure
    try:
        with Rewriting(module).suspended(), heard:
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
    node, how = _first_differing(watch, ours, heard)
    return Difference(what, node, how)


class RunWatch:
    """Notes what each operation of a program makes, and those that make something else when run again.

    Args:
        root: The module whose submodules' paths name the operations.
    """

    def __init__(self, root: nn.Module) -> None:
        self.current: str | None = None  # the operation in its first run
        self.is_between = False  # in a program, but in no operation
        self.unlike: dict[tuple[int, int], str] = {}  # (step, operation) -> name, of those that did not repeat
        self._names = {m: name for name, m in reversed(submodules(root))}
        self._first: dict[tuple[int, int], list[bytes]] = {}
        self._steps: dict[int, int] = {}

    def enters(self) -> None:
        """A program's forward begins."""
        self.is_between = True

    def leaves(self) -> None:
        """It has ended."""
        self.is_between = False

    def begins(self, step: Step, n: int) -> None:
        """The first run of an operation begins."""
        self.current = self._name(step, n)

    def ended(self, step: Step, n: int, made: list[Any]) -> None:
        """Operation `n` has run, for the first time or again.

        Args:
            step: The step that it belongs to.
            n: Its place in the graph.
            made: Its outputs and the tensors saved for its backward.
        """
        self.current = None
        place = self._steps.setdefault(id(step), len(self._steps)), n
        prints = [fingerprint(t) for t in tensors_of(made)]
        if self._first.setdefault(place, prints) != prints:
            self.unlike[place] = self._name(step, n)

    def _name(self, step: Step, n: int) -> str:
        return ".".join(filter(None, (self._names[step.module], step.operations[n].name)))


@dataclass(slots=True)
class _Heard:
    function: str
    prints: list[bytes]
    operation: str | None


class _Listener(TorchFunctionMode):
    """Notes every torch function that a forward calls and what it returns.

    Args:
        watch: That of a planned step, in which the executor's own calls do not count; None for a plain one.
    """

    def __init__(self, watch: RunWatch | None = None) -> None:
        super().__init__()
        self.watch = watch
        self.calls: list[_Heard] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = None if self.watch is None else self.watch.current
        is_ours = operation is None and self.watch is not None and self.watch.is_between  # the executor's own
        is_forward = torch._C._current_graph_task_id() == -1 and not is_recomputing()  # pyright: ignore[reportPrivateUsage]
        if is_forward and not is_ours:
            prints = [fingerprint(t) for t in tensors_of([result])]
            if prints:
                self.calls.append(_Heard(getattr(func, "__name__", str(func)), prints, operation))
        return result


def _first_differing(watch: RunWatch, ours: _Listener, plain: _Listener) -> tuple[str | None, str]:
    """The first operation whose run differs from the plain one, or else the first that does not repeat itself."""
    a, b = ([call.function for call in listener.calls] for listener in (plain, ours))
    for block in SequenceMatcher(a=a, b=b, autojunk=False).get_matching_blocks():
        for k in range(block.size):
            call = ours.calls[block.b + k]
            if call.operation is not None and plain.calls[block.a + k].prints != call.prints:
                return call.operation, "it returns something else than in the plain step"
    if watch.unlike:
        return watch.unlike[min(watch.unlike)], "its recomputation makes something else than its first run"
    return None, ""


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
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
