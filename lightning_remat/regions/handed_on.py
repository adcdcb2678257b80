"""How long what the calls of a step hand on to each other is alive, and what comes into them from the code between."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..measure.meter import tensor_storage
from ..module_state.batches import tensors_held
from ..plans.step_memory import HandedOn, turns_of
from .calls import View


@dataclass(slots=True)
class _Life:
    """That of a storage which is neither a parameter's nor a buffer's nor the batch's.

    Attributes:
        storage: Which.
        num_bytes: Its size.
        maker: The number of the call that returned it; None for what the code between has made.
        is_let_go: Whether that call gets no gradient of it.
        readers: Those of the calls into which it comes.
    """

    storage: weakref.ref[torch.UntypedStorage]
    num_bytes: int
    maker: int | None
    is_let_go: bool = False
    readers: list[int] = field(default_factory=list[int])


def handed_on(module: nn.Module, view: View, batch: Sequence[Tensor]) -> HandedOn:
    """What comes into the calls of a step and leaves them.

    What something saves is there until the backward of its first reader, what nothing saves until its last reader has
    run. What no call reads the code between does, which has its name for the result of the call before
    (`x = block(f(x))`) until the next returns.

    Args:
        module: With all regions.
        view: Of the step.
        batch: The step's own inputs.
    """
    turns = turns_of(view.order, len(view.calls))
    place = {turn: position for position, turn in enumerate(turns)}
    over, is_forward = view.over, [turn >= 0 for turn in turns]
    during, passing = [0] * len(turns), [0] * len(view.calls)

    def add(num_bytes: int, first: int, last: int) -> None:
        for position in range(first, last + 1):
            during[position] += num_bytes

    for life in _lives(view, [*module.parameters(), *module.buffers(), *batch]):
        size, stays, reads = life.num_bytes, life.storage in view.staying, [place[k] for k in life.readers]
        if life.maker is None:
            add(size, min(reads), max(place[~k] for k in life.readers) if stays else max(reads))
        elif life.is_let_go:  # its region does not hold it, and when the step has returned nothing else does
            made = place[life.maker]
            ends = [place[~k] for k in life.readers] if stays else reads
            add(size, made + 1, max([made + is_forward[made + 1], *ends]))
        elif not stays:
            made, end = place[life.maker], place[~life.maker]
            add(-size, made, end)  # as the figures of its region have it, in its backward for a part of that
            add(size, made, max([min(made + 1, end), *reads]))
        elif life.maker in over:  # and others save it
            end = place[~life.maker] + 1
            add(size, end, max([end - 1, *(place[~k] for k in life.readers)]))
        if not stays:
            for k in life.readers:
                passing[k] += size
                add(-size, place[k], place[k])
    return HandedOn(tuple(during), tuple(passing))


def _lives(view: View, throughout: Sequence[Tensor]) -> list[_Life]:
    owned = {id(storage) for t in throughout if (storage := tensor_storage(t)) is not None}
    found: dict[int, _Life] = {}  # of a storage there is one weak reference
    for k, call in enumerate(view.calls):
        inputs = {id(s): s for t in tensors_held((call.args, call.kwargs)) if (s := tensor_storage(t)) is not None}
        for storage in inputs.values():
            if id(storage) not in owned:
                ref = weakref.ref(storage)
                found.setdefault(id(ref), _Life(ref, storage.nbytes(), None)).readers.append(k)
        for ref, size, gradient_bytes in call.outputs:
            if id(ref()) not in owned:
                asked = call.span.gradients
                is_let_go = asked is not None and gradient_bytes > 0 and gradient_bytes not in asked
                found.setdefault(id(ref), _Life(ref, size, k, is_let_go))
    return list(found.values())
