"""Backwards within a step: what is called before one, and what after it, is not alive together."""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Hashable, Iterable
from operator import ge
from typing import Any

from ..module_state.nesting import tensors_in


class Backwards:
    """Tells whether a backward has run, or would have, that let go of what was saved for it.

    Attributes:
        have_run: Since this was last made False.
    """

    def __init__(self) -> None:
        self.have_run = False

    def asked(self, *_: Any, retain_graph: bool | None = None, create_graph: bool = False, **__: Any) -> None:
        """A backward runs with these arguments of `torch.autograd.backward`, or would run."""
        keeps = create_graph if retain_graph is None else retain_graph
        self.have_run |= not keeps


def alive_together(calls: Iterable[tuple[int, Hashable, Any, Any]]) -> set[int]:
    """The phases of a step for which no other one stands: one in which the same is called as often, on as much.

    Several updates in one step (PPO), or two passes before one update (SAM), are phases alike; the last one is kept.
    Phases that differ (the two halves of a GAN's step) are all kept, and taken to be alive at once.

    Args:
        calls: Of each call its phase, what is called, and its arguments.
    """
    sizes: dict[int, dict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
    for phase, what, args, kwargs in calls:
        insort(sizes[phase][what], sum(t.numel() for t in tensors_in((args, kwargs))))

    def covers(one: int, other: int) -> bool:
        return all(_are_larger(sizes[one].get(what, []), own) for what, own in sizes[other].items())

    def is_covered(phase: int) -> bool:
        others = (other for other in sizes if other != phase and covers(other, phase))
        return any(other > phase or not covers(phase, other) for other in others)

    return {phase for phase in sizes if not is_covered(phase)}


def _are_larger(some: list[int], others: list[int]) -> bool:
    """Whether there are as many, the largest at least as large as the largest of the others, and so on; both sorted."""
    return len(some) >= len(others) and all(map(ge, some[len(some) - len(others) :], others))
