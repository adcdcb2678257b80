"""Compares steps by a plan with plain ones, bit by bit, and names the first operation that differs."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..execution.modified import retried
from ..execution.rewriter import Rewriting, programs_in, watched
from ..measure.out_of_memory import is_out_of_memory
from ..module_state.agreement import OtherRankError, all_ranks, together
from ..module_state.random_state import preserved_random
from ..module_state.sharding import local_part
from ..operations.saved_tensors import tensors_of

Outcome = Mapping[str, bytes]
"""What a step produces (losses or outputs, gradients, buffers, random states): by name, the `fingerprint` of each."""

Run = Callable[[], Outcome]
"""Runs one step and undoes it, random states included."""

Agree = Callable[[int], int]
"""The least of all processes' numbers."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What a planned step does otherwise than the plain one.

    Attributes:
        what: The first result that differs, or the error that only the planned step raises.
        node: The first operation whose recomputation makes something else than its first run; None if none does.
        when: In which step, where that is not the one that comes next.
    """

    what: str
    node: str | None
    when: str = ""

    def __str__(self) -> str:
        where = "every operation repeats itself"
        if self.node is not None:
            where = f"first differing node {self.node!r}: its recomputation makes something else than its first run"
        when = f" {self.when}" if self.when else ""
        return f"a planned step{when} differs from the plain one in its {self.what} ({where})"


@dataclass(frozen=True, slots=True)
class Compared:
    """What became of one step.

    Attributes:
        by_plan: Whether it was compared, and all of the plan took part in it, in every process.
        difference: What this process found.
        differs: Whether any process found something.
    """

    by_plan: bool
    difference: Difference | None = None
    differs: bool = False


def find_difference(module: nn.Module, run: Run) -> Difference | None:
    """What steps by the module's plan do otherwise than plain steps; None if nothing. The plan stays installed.

    Args:
        module: Rewritten, as a whole or in parts.
        run: Runs one step and undoes it.
    """
    for seed in range(3):  # steps, each with random numbers of its own
        with preserved_random():
            if seed:
                torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
            found = compared(module, run, agree=lambda value: min(all_ranks(module, value)), may_vary=False)
        if found.differs:
            return next(d for d in (found.difference, *all_ranks(module, found.difference)) if d is not None)
    return None


def compared(module: nn.Module, run: Run, *, agree: Agree, when: str = "", may_vary: bool = True) -> Compared:
    """One step by the module's plan beside the plain one; the plan stays installed.

    A step that does not fit, that raises without a plan, too, or in which nothing runs by a plan is not compared.

    Args:
        module: Rewritten, as a whole or in parts.
        run: Runs the step and undoes it.
        agree: Lets all processes that run the step do the same.
        when: Which step it is, for the message.
        may_vary: Whether nothing is said of a step whose plain runs differ from each other.
    """
    programs = programs_in(module)
    with _unlearned(module), watched(module) as ran:
        planned = _outcome(module, lambda: retried(run))
    # Where nothing ran by a plan both are plain; what does not fit cannot be compared.
    if agree(int(planned is not None)) == 0 or agree(-len(ran)) == 0:
        return Compared(by_plan=False)
    plain = _plain(module, run)
    if agree(int(plain is not None and _COURSE not in plain)) == 0:
        return Compared(by_plan=False)
    what = _unlike(plain, planned)
    by_plan = agree(int(ran == programs)) == 1
    if agree(int(what is None)) == 1:
        return Compared(by_plan)
    told = what or "results on another rank"
    if may_vary and agree(int(_repeats_itself(module, run, plain))) == 0:
        warnings.warn(
            f"a step is not compared with the planned one: its plain runs differ from each other in their {told}. That "
            "may be an operation that is not deterministic, or something that steps use up and nobody can put back: "
            "those that were tried have used it, too",
            stacklevel=2,
        )
        return Compared(by_plan)
    if may_vary:
        with _unlearned(module), watched(module):  # as before: what is watched is run one by one
            again = _outcome(module, run)
        if agree(int(_unlike(plain, again) is None)) == 1:
            warnings.warn(
                f"a planned step differed from the plain one in its {told}, and did not when it was run again",
                stacklevel=2,
            )
            return Compared(by_plan)
    watch = RunWatch()
    with _unlearned(module), watched(module, watch):
        _outcome(module, run)
    node = watch.unlike[0] if watch.unlike else None
    return Compared(by_plan, None if what is None else Difference(what, node, when), differs=True)


_COURSE = "course"
"""The one result of a step that raises."""


def _outcome(module: nn.Module, run: Run) -> Outcome | None:
    """What a step produces, or that it raises an error; None if it does not fit."""
    try:
        return together(module, run, is_out_of_memory)
    except OtherRankError:
        raise
    except Exception as error:
        return None if is_out_of_memory(error) else {_COURSE: f"{type(error).__name__}: {error}".encode()}


def _plain(module: nn.Module, run: Run) -> Outcome | None:
    with Rewriting(module).suspended():
        return _outcome(module, run)


def _repeats_itself(module: nn.Module, run: Run, plain: Outcome | None) -> bool:
    others = [_plain(module, run) for _ in range(2)]  # every process runs both
    return all(_unlike(plain, other) is None for other in others)


@contextmanager
def _unlearned(module: nn.Module) -> Generator[None]:
    """What programs learn inside, from a step of another size, is forgotten."""
    before = [(program, dict(program.learned), list(program.variants)) for program in programs_in(module)]
    try:
        yield
    finally:
        for program, learned, variants in before:
            program.learned.clear()
            program.learned.update(learned)
            program.variants[:] = variants


def _unlike(plain: Outcome | None, other: Outcome | None) -> str | None:
    """What of two outcomes is not the same; None if nothing."""
    plain, other = plain or {}, other or {}
    if _COURSE in other:
        return f"{_COURSE}: {other[_COURSE].decode()}"
    return next((name for name in {**plain, **other} if plain.get(name) != other.get(name)), None)


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
    """A hash of the bits of a tensor's values, its shape and its type; of a distributed one, of the part that is here.

    What is not a number is alike.
    """
    with torch.no_grad(), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        here = local_part(tensor).detach()
        dense = here if here.layout is torch.strided else here.to_dense()
        dense = dense.resolve_conj().resolve_neg().cpu().contiguous()
        if dense.itemsize > 1 and (dense != dense).any():
            dense = torch.where(dense == dense, dense, torch.nan)
        head = f"{tuple(dense.shape)} {dense.dtype}".encode()
        data = dense.reshape(-1).view(torch.uint8).numpy().data
        found = hashlib.blake2b(head, digest_size=16)
        found.update(data)
        return found.digest()
