"""Recomputations of which more is wanted than their outputs: their tapes, or the random numbers of their first runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ..module_state.ambient import Recomputing
from ..module_state.random_state import Draws
from ..operations.leaves import Differentiable, ask_for_gradients
from ..operations.saved_tensors import Likeness, likeness_of


class Recorded(Protocol):
    """What an execution noted of first runs, by the numbers of operations; see there."""

    values: list[Any]
    differentiable: dict[int, tuple[Differentiable, ...]]
    draws: dict[int, Draws]
    taped: dict[int, list[tuple[int, Likeness]]]
    tapes: dict[int, dict[int, Tensor]]

    @property
    def saved(self) -> Mapping[int, Sequence[Any]]: ...

    def name_of(self, n: int) -> str: ...


class _Caught(list[Tensor]):
    """What autograd saves, from where a backward within the recomputation reads it."""

    def pack(self, tensor: Tensor) -> int:
        """Its number."""
        self.append(tensor)
        return len(self) - 1


class Attended:
    """Is told when such a recomputation begins and when it has ended; as a context, one that fails leaves nothing.

    It runs as its first run did, with gradients, whether others around it do or not.

    Args:
        recorded: Of the first runs.
    """

    __slots__ = ("_caught", "_draws", "_hooks", "_is_caught", "_is_running", "_recorded", "_settings")

    def __init__(self, recorded: Recorded) -> None:
        self._recorded, self._caught, self._settings = recorded, _Caught(), Recomputing(None)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._caught.pack, self._caught.__getitem__)
        self._is_running = self._is_caught = False
        self._draws: Draws | None = None  # of the operation that runs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._caught.clear()  # it holds the graph that holds the hook that holds it
        try:
            self.drawn(has_failed=True)
        finally:
            if self._is_running:
                self._stop(*error)

    def begin(self, n: int, *, with_tape: bool = True) -> None:
        """Operation n runs again: what it saves is caught, if that is wanted and not there, and it draws the same."""
        recorded = self._recorded
        for slot, leaf in recorded.differentiable.get(n, ()):
            if (value := recorded.values[slot]) is not None:  # else a copy is read, which asks where the value did
                ask_for_gradients(value, leaf)  # others around it may have made it without
        self._settings.__enter__()
        self._is_running = True
        if n in recorded.draws:
            self.draw(n)
        if with_tape and n in recorded.taped and n not in recorded.tapes:
            self._hooks.__enter__()
            self._is_caught = True

    def end(self, n: int) -> None:
        """It has run."""
        is_caught = self._is_caught
        self._stop(None, None, None)
        self.drawn()
        if is_caught:
            self._keep_tape(n)

    def draw(self, n: int) -> None:
        """Operation n draws what it drew in its first run; all that is wanted of one that does not begin here."""
        draws = self._recorded.draws[n]
        draws.begin_again()
        self._draws = draws

    def drawn(self, *, has_failed: bool = False) -> None:
        """It has drawn."""
        draws, self._draws = self._draws, None
        if draws is not None:
            draws.end_again(has_failed=has_failed)

    def _stop(self, *error: Any) -> None:
        is_caught = self._is_caught
        self._is_running = self._is_caught = False
        try:
            if is_caught:
                self._hooks.__exit__(*error)
        finally:
            self._settings.__exit__(*error)

    def _keep_tape(self, n: int) -> None:
        recorded, saved = self._recorded, self._caught
        own, num_saved = recorded.taped[n], len(recorded.saved[n])
        if len(saved) != num_saved or not all(likeness_of(saved[k]) == likeness for k, likeness in own):
            raise RuntimeError(
                f"{recorded.name_of(n)} saved other tensors for its backward in its recomputation than in its first "
                f"run ({num_saved} then, {len(saved)} now), so it does not do the same twice. Remedy: leave it out of "
                "the rewritten modules"
            )
        # Cut from the graph, which holds the inputs.
        recorded.tapes[n] = {k: t.detach() if (t := saved[k]).requires_grad else t for k, _ in own}
        saved.clear()
