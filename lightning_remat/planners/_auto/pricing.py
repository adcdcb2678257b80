"""Chooses among the schedules found by what they cost as they are answered: with tapes kept and stretches joined."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ...budget import ALL_BYTES
from ...schedules.arrays import decode, encode
from ...schedules.compiled import Small
from ...schedules.compiled_simulator import Judge
from ...schedules.graph import Graph
from ...schedules.schedule import Schedule
from . import constants
from .front import Front
from .residents import costs_of
from .stretches import stretches_joined
from .tapes import tapes_kept


def is_priced(graph: Graph) -> bool:
    """Whether anything but single runs has a price."""
    return any(node.stretch_price or node.tape_price or node.hook_price for node in graph.nodes)


def finished(graph: Graph, schedule: Schedule, limit: int) -> Schedule:
    """The schedule with tapes kept, and then stretches joined, as far as they fit under a peak: never slower."""
    return decode(graph, _finished(graph, encode(graph, schedule), limit))


def priced_front(graph: Graph, found: Sequence[Front]) -> Front:
    """The states of fronts of one graph, by what they cost finished within the peak that the new front tells.

    Each is finished with the room up to its own peak, and with that up to peaks further above as long as this may make
    it the fastest there: where stretches cost much, more runs in fewer stretches are faster than fewer runs.

    Args:
        graph: The operations with all prices.
        found: At least one front, by whatever seconds.
    """
    judge = Judge(graph)
    states = [(front.peaks[index], front, index) for front in found for index in range(len(front.peaks))]
    states.sort(key=lambda state: state[0], reverse=True)  # what is fast with most room tells whom to try no further
    limits = sorted({peak for peak, _, _ in states})
    priced, known = Front(graph, found[0].problem), set[bytes]()
    for peak, front, index in states:
        codes = front.codes(index)
        if codes.tobytes() in known:
            continue
        known.add(codes.tobytes())
        # As if all had room: no limit makes it faster where stretches cost the same whatever begins them.
        least = judge.cost_of(_finished(graph, codes, ALL_BYTES)).seconds
        own = bisect_left(limits, peak)
        for limit in (limits[own + above] for above in constants.ROOMS_ABOVE if own + above < len(limits)):
            if not priced.is_better(limit, least):
                break
            seconds = judge.cost_of(_finished(graph, codes, limit)).seconds
            priced.offer_recipe(limit, seconds, front.recipe(index))
            if seconds <= least:
                break
    return priced


def _finished(graph: Graph, codes: Small, limit: int) -> Small:
    costs = costs_of(graph)
    kept = tapes_kept(costs, codes, limit)
    codes = kept if len(kept) else codes
    if not any(node.stretch_price for node in graph.nodes):
        return codes
    joined = stretches_joined(costs, codes, limit)
    return joined if len(joined) else codes
