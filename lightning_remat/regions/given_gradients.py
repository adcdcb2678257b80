"""Of which outputs of its calls a step asks gradients: of a model that returns its loss beside logits, of the loss."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..operations.saved_tensors import nodes_below
from .calls import Call, Returned
from .phases import Span
from .saved_between import Staying


def note_gradients(results: Sequence[Tensor], calls: Mapping[Span, Sequence[Returned]], outside: Staying) -> None:
    """Notes at each call of a step with one backward, in its span, the sizes of the gradients that come into it.

    A call is known by the nodes of autograd's graph that it has made: they are numbered. What leads into it from others
    is asked of it. What the code outside saves or returns counts as asked for, as it stays. Where something else is
    asked for than what the call has returned (an attribute that it has set), nothing is noted: all may be.

    Args:
        results: What the step has returned.
        calls: What each call has returned.
        outside: What the code outside the calls saves, and what the step returns.
    """
    spans = sorted((span for span in calls if span.made), key=lambda span: span.made.start)
    starts = [span.made.start for span in spans]

    def of(node: Any) -> Span | None:
        number = node._sequence_nr()
        place = bisect_right(starts, number) - 1
        return spans[place] if place >= 0 and number in spans[place].made else None

    found: defaultdict[Span, set[int]] = defaultdict(set)

    def enter(node: Any, number: int, source: Span | None) -> None:
        if (span := of(node)) is not None and span is not source:
            found[span].add(_gradient_bytes(node, number))

    for tensor in results:
        if tensor.grad_fn is not None:
            enter(tensor.grad_fn, tensor.output_nr, None)
    for node in nodes_below(results):
        source = of(node)
        for following, number in node.next_functions:
            if following is not None:
                enter(following, number, source)
    for span, sizes in found.items():
        if sizes <= {returned.gradient_bytes for returned in calls[span]}:
            span.gradients = frozenset(sizes.union(r.gradient_bytes for r in calls[span] if r.storage in outside))


def note_together(calls: Iterable[Call]) -> None:
    """What is asked of one call of a region counts for all, as they have one profile."""
    regions: defaultdict[str, list[Span]] = defaultdict(list)
    for call in calls:
        regions[call.name].append(call.span)
    for spans in regions.values():
        known = [span.gradients for span in spans if span.gradients is not None]
        of_all = frozenset[int]().union(*known) if len(known) == len(spans) else None
        for span in spans:
            span.gradients = of_all


def _gradient_bytes(node: Any, number: int) -> int:
    """Bytes of the gradient that a node gets for one of its outputs; -1 where it has no such sizes (nested tensors)."""
    told = node._input_metadata[number]
    return -1 if told.is_nested_tensor else math.prod(told.shape) * told.dtype.itemsize
