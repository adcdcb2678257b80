"""Peak and seconds of valid schedules, compiled: a family of hundreds is judged in the time of a few simulations.

`simulate` stays the judge of what is answered: `tests/schedules/test_judge.py` holds the two equal, to the byte.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .arrays import BACKWARD, DISCARD, DISCARD_TAPE, RUN, GraphArrays, encode, graph_arrays
from .compiled import Flags, Ints, Small, njit
from .gradients import gradient_levels
from .graph import Graph
from .schedule import Schedule


class Cost(NamedTuple):
    """What a schedule costs, as `simulate` says."""

    peak_bytes: int
    seconds: float


class Judge:
    """Judges schedules of one graph that break no rule and whose backwards run in the reverse order of the nodes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._arrays = graph_arrays(graph)
        before, released = gradient_levels(graph)
        _, held = gradient_levels(graph, is_released=False)
        self._levels: Ints = np.array([before, released, held], np.int64)
        self._fixed_bytes = graph.input_bytes + graph.static_bytes
        self._plain_seconds = [s for n in graph.nodes for s in (n.forward_seconds, n.backward_seconds)]
        self._rerun_seconds = np.array([n.rerun_seconds for n in graph.nodes], np.float64)
        self._hook_prices = np.array([n.hook_price for n in graph.nodes], np.float64)
        self._tape_prices = np.array([n.tape_price for n in graph.nodes], np.float64)
        self._stretch_prices = np.array([n.stretch_price for n in graph.nodes], np.float64)

    def cost(self, schedule: Schedule) -> Cost:
        """Its peak, of which bytes are exact, and seconds."""
        return self.cost_of(encode(self.graph, schedule))

    def cost_of(self, codes: Small) -> Cost:
        """The same of actions as numbers."""
        peak_bytes = int(_peak(self._arrays, self._levels, self._fixed_bytes, codes))
        runs: Any = codes[codes & 3 <= BACKWARD]  # and backwards, which end a stretch
        nodes: Any = runs >> 2
        is_again = runs & 3 == RUN
        is_again[np.unique(runs, return_index=True)[1]] = False
        begins = is_again & ~np.concatenate([[False], is_again[:-1]])
        seconds: Any = [self._plain_seconds, self._rerun_seconds[nodes[is_again]], self._stretch_prices[nodes[begins]]]
        if self._tape_prices.any():
            seconds.append(np.repeat(self._tape_prices, _num_tapes(self._arrays, codes)))
        if self._hook_prices.any():
            seconds.append(self._hook_prices[_hooked(self._arrays, codes)])
        return Cost(peak_bytes, math.fsum(np.concatenate(seconds).tolist()))


@njit
def _peak(arrays: GraphArrays, levels: Ints, fixed_bytes: int, codes: Small) -> int:
    """The most alive. A storage is the number of the run that made it; views and the caller hold it, too."""
    count = len(arrays.root)
    storage = np.full(count, -1)  # of the resident output
    held_by_caller = np.full(count, -1)
    is_taped, is_done = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    sizes, holders = np.zeros(len(codes), np.int64), np.zeros(len(codes), np.int64)
    gradients = np.int64(0)
    alive = np.int64(fixed_bytes)
    peak = alive
    for at in range(len(codes)):
        n, kind = codes[at] >> 2, codes[at] & 3
        released = np.int64(-1)  # a storage of which one holder goes
        if kind == RUN:
            peak = max(
                peak,
                alive + gradients + arrays.output_bytes[n] + arrays.tape_bytes[n] + arrays.workspace_bytes[n],
            )
            if storage[n] < 0:
                base = arrays.base[n]
                if base < 0:
                    storage[n] = at
                    sizes[at] = arrays.output_bytes[n]
                    alive += sizes[at]
                else:
                    storage[n] = storage[base]
                holders[storage[n]] += 1
                if arrays.is_output[n] and held_by_caller[n] < 0 and not is_done[n]:
                    held_by_caller[n] = storage[n]
                    holders[storage[n]] += 1
            if not is_taped[n]:
                is_taped[n] = True
                alive += arrays.tape_bytes[n]
        elif kind == BACKWARD:
            is_released = _ends_at(arrays, codes, at, n)
            peak = max(peak, alive + levels[1 if is_released else 2, n])
            gradients = levels[0, n - 1] if n else np.int64(0)
            is_done[n] = True
            released = held_by_caller[n]
            held_by_caller[n] = -1
        elif kind == DISCARD:
            released = storage[n]
            storage[n] = -1
        else:
            is_taped[n] = False
            alive -= arrays.tape_bytes[n]
        if released >= 0:
            holders[released] -= 1
            if holders[released] == 0:
                alive -= sizes[released]
    return int(peak)


@njit
def _num_tapes(arrays: GraphArrays, codes: Small) -> Ints:
    """How many runs of each operation bring its tape, the first left out."""
    count = len(arrays.root)
    is_taped, found = np.zeros(count, np.bool_), np.where(arrays.tape_bytes > 0, -1, 0)
    for at in range(len(codes)):
        n, kind = codes[at] >> 2, codes[at] & 3
        if kind == RUN and not is_taped[n] and arrays.tape_bytes[n] > 0:
            is_taped[n] = True
            found[n] += 1
        elif kind == DISCARD_TAPE:
            is_taped[n] = False
    return found


@njit
def _hooked(arrays: GraphArrays, codes: Small) -> Flags:
    """To which operations hooks hand over what they save: something of it is not there all the time, nor rests."""
    count = len(arrays.root)
    first_run, output_gone, tape_gone = np.full(count, -1), np.full(count, -1), np.full(count, -1)  # at which action
    is_there, found = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    rests, tape_rests = _resting(arrays, codes), _resting_tapes(arrays, codes)
    for at in range(len(codes)):
        n, kind = codes[at] >> 2, codes[at] & 3
        if kind == DISCARD:
            output_gone[n] = at
            is_there[n] = False
        elif kind == DISCARD_TAPE:
            tape_gone[n] = at
        elif kind == RUN:
            is_there[n] = True
            if first_run[n] < 0:
                first_run[n] = at
                for k in range(arrays.saved_start[n], arrays.saved_start[n + 1]):
                    i = arrays.saved[k]
                    found[n] = found[n] or not (is_there[i] or (rests[i] and arrays.is_held[k]))
        else:
            found[n] = found[n] or (tape_gone[n] > first_run[n] and not tape_rests[n])
            for k in range(arrays.saved_start[n], arrays.saved_start[n + 1]):
                i = arrays.saved[k]
                found[n] = found[n] or (output_gone[i] > first_run[n] and not (rests[i] and arrays.is_held[k]))
    return found


@njit
def _resting(arrays: GraphArrays, codes: Small) -> Flags:
    """As `uses.resting`."""
    count = len(arrays.root)
    has_run, is_there, is_gone = np.zeros(count, np.bool_), np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    is_read, found = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    is_forward, missing = True, count
    for at in range(len(codes)):
        n, kind = codes[at] >> 2, codes[at] & 3
        if kind == RUN:
            if has_run[n] and is_forward:
                if missing > 0:
                    return found
                is_forward = False
            missing -= 0 if has_run[n] else 1
            if is_gone[n] and not is_there[n]:
                found[n] = not is_read[n]
            has_run[n] = is_there[n] = True
        elif kind == BACKWARD:
            is_forward = False
            for k in range(arrays.saved_start[n], arrays.saved_start[n + 1]):
                is_read[arrays.saved[k]] = True
        elif kind == DISCARD:
            is_there[n] = False
            is_gone[n] = is_gone[n] or is_forward
    return found


@njit
def _resting_tapes(arrays: GraphArrays, codes: Small) -> Flags:
    """As `uses.resting_tapes`."""
    count = len(arrays.root)
    num_runs, num_discards = np.zeros(count, np.int64), np.zeros(count, np.int64)
    is_done, found = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    last_run, missing, is_forward = -1, count, True
    for at in range(len(codes)):
        n, kind = codes[at] >> 2, codes[at] & 3
        if kind == RUN:
            if num_runs[n] > 0 and is_forward:
                if missing > 0:
                    return np.zeros(count, np.bool_)
                is_forward = False
            last_run = n
            missing -= 0 if num_runs[n] > 0 else 1
            num_runs[n] += 0 if is_done[n] else 1
        elif kind == BACKWARD:
            is_forward, is_done[n] = False, True
        elif kind == DISCARD_TAPE and not is_done[n]:
            num_discards[n] += 1
            found[n] = found[n] or (num_runs[n] == 1 and n == last_run and is_forward and arrays.is_tape_held[n])
    return found & (num_runs == 2) & (num_discards == 1)


@njit
def _ends_at(arrays: GraphArrays, codes: Small, at: int, n: int) -> bool:
    """Whether what the backward of n reads of its own is discarded right after it."""
    keeps_output = False
    for k in range(arrays.saved_start[n], arrays.saved_start[n + 1]):
        keeps_output = keeps_output or arrays.saved[k] == n
    keeps_tape = arrays.tape_bytes[n] > 0
    at += 1
    while at < len(codes) and codes[at] & 3 > BACKWARD:
        if codes[at] >> 2 == n:
            keeps_output = keeps_output and codes[at] & 3 != DISCARD
            keeps_tape = keeps_tape and codes[at] & 3 != DISCARD_TAPE
        at += 1
    return not (keeps_output or keeps_tape)
