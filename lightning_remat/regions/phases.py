"""Several backwards in a step: which calls are alive together, and in which order they run forward and backward."""

from __future__ import annotations

import weakref
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import ge
from typing import Any, cast

import torch
from torch import Tensor

from ..module_state.nesting import tensors_in
from ..operations.saved_tensors import nodes_below

_MARK = "lightning_remat.spans"
"""Of what leads to the outputs of a call, the key to the call's span, and to its `_Leading`, in a node's metadata."""


@dataclass(slots=True, eq=False)
class Span:
    """How long a call waits for its backward, counted in backwards that let go of what was saved for them.

    Attributes:
        begun: How many had run before the call.
        until: How many had run before its own backward; as many as before the call where none was seen.
        comes: Whether one was seen.
        awaiting: What is alive as long as one may come.
        made: The numbers of the nodes of autograd's graph that it has made; none where it cannot be served.
        gradients: The sizes of the gradients that come into it, in bytes; None where one may come of all that it has
            returned.
    """

    begun: int = 0
    until: int = 0
    comes: bool = False
    awaiting: Callable[[], object | None] = lambda: None
    made: range = range(0)
    gradients: frozenset[int] | None = None

    @property
    def is_over(self) -> bool:
        """Whether no backward comes: of what the call returned nothing is left that leads to one."""
        return not self.comes and self.awaiting() is None


class _Leading:
    """Lives as long as what leads to the outputs of a call."""


class Backwards:
    """Counts the backwards of a step that run, or would, and let go of what was saved for them.

    Attributes:
        num_run: Those before what happened last.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.num_run, self._one_more = 0, False

    def called(self) -> Span:
        """A call begins."""
        self.before_now()
        begin = _num_nodes()
        return Span(self.num_run, self.num_run, made=range(begin, begin))

    def before_now(self) -> int:
        """How many have run before what happens now, which is none."""
        self.num_run += self._one_more
        self._one_more = False
        return self.num_run

    def awaited(self, span: Span, outputs: Iterable[Tensor]) -> None:
        """A call has returned what a backward will come in by."""
        span.made = range(span.made.start, _num_nodes())
        nodes: set[Any] = {t.grad_fn for t in outputs if t.grad_fn is not None}
        leading = _Leading()
        span.awaiting = weakref.ref(leading)
        for node in nodes:
            node.metadata.setdefault(_MARK, []).append((span, leading))
            node.register_prehook(partial(self._comes_to, span))

    def asked(self, *args: Any, retain_graph: bool | None = None, create_graph: bool = False, **kwargs: Any) -> None:
        """A backward runs with these arguments of `torch.autograd.backward`, or would run."""
        for node in nodes_below(tensors_in((args, kwargs))):
            for span, _ in node.metadata.get(_MARK, ()):
                self._comes_to(span)
        self.runs(retains_graph=create_graph if retain_graph is None else retain_graph)

    def runs(self, *, retains_graph: bool) -> None:
        """A backward runs."""
        self._one_more |= not retains_graph

    def _comes_to(self, span: Span, *_: Any) -> None:
        span.until, span.comes = self.num_run, True


def _num_nodes() -> int:
    """How many nodes of autograd's graph this thread has made."""
    return cast(Any, torch.autograd)._get_sequence_nr()


def alive_together(calls: Iterable[tuple[Span, Hashable, Any, Any]]) -> set[int]:
    """The phases of a step, from one backward to the next, for which no other one stands.

    One does in which the same is called as often, on as much. Several updates in one step (PPO), or two passes before
    one update (SAM), are phases alike; the last one is kept. Where a call waits for a later backward than the next, all
    are.

    Args:
        calls: Of each call its span, what is called, and its arguments.
    """
    sizes: dict[int, dict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
    is_apart = True
    for span, what, args, kwargs in calls:
        is_apart &= span.begun == span.until
        insort(sizes[span.begun][what], sum(t.numel() for t in tensors_in((args, kwargs))))

    def covers(one: int, other: int) -> bool:
        return all(_are_larger(sizes[one].get(what, []), own) for what, own in sizes[other].items())

    def is_covered(phase: int) -> bool:
        others = (other for other in sizes if other != phase and covers(other, phase))
        return is_apart and any(other > phase or not covers(phase, other) for other in others)

    return {phase for phase in sizes if not is_covered(phase)}


def order_of(spans: Sequence[Span]) -> tuple[int, ...]:
    """The order in which calls run, as `Surroundings.order` tells it: empty where one backward is for all."""
    if len({(span.begun, span.until) for span in spans}) < 2:
        return ()
    order: list[int] = []
    for phase in range(1 + max(span.until for span in spans)):
        order += [k for k, span in enumerate(spans) if span.begun == phase]
        order += [~k for k, span in reversed(list(enumerate(spans))) if span.until == phase]
    return tuple(order)


def _are_larger(some: list[int], others: list[int]) -> bool:
    """Whether there are as many, the largest at least as large as the largest of the others, and so on; both sorted."""
    return len(some) >= len(others) and all(map(ge, some[len(some) - len(others) :], others))
