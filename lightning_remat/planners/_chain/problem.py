"""A chain as the whole-number arrays that the dynamic programs of beaumont2024 read.

A *state* (s, t, l) is the paper's C_FL(s, t, l, .): with a^(s-1) and delta^l in memory, run the backwards of stages l
down to t. States with s = t are those of C_MP. A state with s < t has a^(s-1) *floating*: it may be replaced by a later
and larger activation, up to a^(t-1) (Corollary 4.5). Available memory m does not count a^(s-1).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...chain import Chain, WholeSizes
from ...schedules.compiled import Floats, Ints

# Sums of sizes stay exact in 64 bits, and times the number of slots too.
_SIZE_BITS = 52


class StageCosts(NamedTuple):
    """What the stages of a chain weigh, in whole units, and take; arrays are indexed by stage from 1, `output` from 0.

    Attributes:
        output: a^l.
        tape: abar^l.
        held: Held all the time when the backwards of the stages after l are done and that of l is not: delta^l.
        keep_peak: Most memory of `Fck` of a stage beyond its input and what is held.
        drop_peak: Most memory of `Fn` of a stage, its input counted, beyond what is held.
        fall_peak: Most memory of `Fall` of a stage beyond its input and what is held.
        leaf_peak: Most memory of a `Fall` right before its `B`, which need not make what only the next stage reads,
            and of that `B`, beyond the input and what is held before it.
        kept_leaf_peak: The same where a^l was kept for the backward just done, and is there still.
        back_peak: Most memory of `B` of a stage beyond its input.
        forward_seconds: u_f.
        leaf_seconds: The same of a `Fall` right before its `B`.
        kept_leaf_seconds: The same where a^l is there still.
        backward_seconds: u_b.
    """

    output: Ints
    tape: Ints
    held: Ints
    keep_peak: Ints
    drop_peak: Ints
    fall_peak: Ints
    leaf_peak: Ints
    kept_leaf_peak: Ints
    back_peak: Ints
    forward_seconds: Floats
    leaf_seconds: Floats
    kept_leaf_seconds: Floats
    backward_seconds: Floats


class Problem(NamedTuple):
    """A chain as arrays, indexed by stage from 1.

    Attributes:
        num_stages: L+1.
        costs: Of the stages.
        elapsed: Sums of `forward_seconds`: elapsed[e] - elapsed[s-1] runs s to e.
        run: run[s, e]: most memory beyond a^(s-1) and what is held that runs stages s to e, when a^(s-1) stays.
        tail: tail[s, e]: most memory beyond what is held in stages s+1 to e, when a^(s-1) has gone.
        state_row: The row of state (s, t, t) in a table, l - t rows before that of (s, t, l); -1 where none is.
        num_rows: Rows in a table; the last ones are those of `rest_row`.
        bases: bases[u, :num_bases[u]]: the s, ascending, for which there are states (s, u, .).
        num_bases: How many.
        ends: ends[s, :num_ends[s]]: the t, ascending, for which there are states (s, t, .).
        num_ends: How many.
        keeps_tapes: Whether `Fall` may come before its backward's turn; otherwise only layer inputs are kept.
    """

    num_stages: int
    costs: StageCosts
    elapsed: Floats
    run: Ints
    tail: Ints
    state_row: Ints
    num_rows: int
    bases: Ints
    num_bases: Ints
    ends: Ints
    num_ends: Ints
    keeps_tapes: bool


class Scale(NamedTuple):
    """How the units of a `Problem` relate to the chain's own: `WholeSizes`, then 2^shift of those to a unit."""

    sizes: WholeSizes
    shift: int

    def to_chain(self, amount: int) -> float:
        """`amount` units in the chain's own unit, not rounded below what `from_chain` takes back."""
        value = self.sizes.to_unit(amount << self.shift)
        while self.from_chain(value) < amount:
            value = float(np.nextafter(value, np.inf))
        return value

    def from_chain(self, amount: float) -> int:
        """The whole units within `amount` of the chain's own unit."""
        return self.sizes.from_unit(amount) >> self.shift


def build(chain: Chain, *, keeps_tapes: bool, floating: bool) -> tuple[Problem, Scale]:
    """The problem of `chain` by Table 1 and Definition 3.3, and how its unit relates to the chain's."""
    sizes = WholeSizes.of(chain)
    columns = (sizes.output, sizes.tape, sizes.forward_workspace, sizes.backward_workspace)
    shift = max(0, sum(map(sum, columns)).bit_length() - _SIZE_BITS)
    output, tape, forward, backward = (np.array([-(-x >> shift) for x in c], dtype=np.int64) for c in columns)
    before = np.concatenate((output[:1], output[:-1]))
    leaf = tape + np.maximum(forward, before + backward)
    seconds = np.array([0.0, *(s.forward_seconds for s in chain.stages)])
    costs = StageCosts(
        output,
        tape,
        held=output,
        keep_peak=output + forward,
        drop_peak=before + output + forward,
        fall_peak=tape + forward,
        leaf_peak=leaf,
        kept_leaf_peak=leaf,
        back_peak=output + before + tape + backward,
        forward_seconds=seconds,
        leaf_seconds=seconds,
        kept_leaf_seconds=seconds,
        backward_seconds=np.array([0.0, *(s.backward_seconds for s in chain.stages)]),
    )
    return assemble(costs, keeps_tapes=keeps_tapes, floating=floating), Scale(sizes, shift)


def assemble(costs: StageCosts, *, keeps_tapes: bool, floating: bool) -> Problem:
    """The problem of stages with the given costs, and the states that its family of sequences has."""
    output = costs.output
    n = len(output) - 1
    state_row = np.full((n + 1, n + 1), -1, dtype=np.int64)
    num_rows = 0
    for s in range(1, n + 1):
        for t in range(s, n + 1):
            # An equal or smaller successor is kept from the start instead (Corollary 4.5), so it needs no state.
            if s == t or (floating and output[t - 1] > output[s - 1]):
                state_row[s, t] = num_rows
                num_rows += n + 1 - t
    run = np.zeros((n + 1, n + 1), dtype=np.int64)
    tail = np.zeros((n + 1, n + 1), dtype=np.int64)
    for s in range(1, n + 1):
        tail[s, s + 1 :] = np.maximum.accumulate(costs.drop_peak[s + 1 :])
        run[s, s:] = np.maximum(tail[s, s:], costs.keep_peak[s])
    exists = state_row >= 0
    bases, num_bases = _listed(exists.T)
    ends, num_ends = _listed(exists)
    return Problem(
        num_stages=n,
        costs=costs,
        elapsed=np.cumsum(costs.forward_seconds),
        run=run,
        tail=tail,
        state_row=state_row,
        num_rows=num_rows + n,
        bases=bases,
        num_bases=num_bases,
        ends=ends,
        num_ends=num_ends,
        keeps_tapes=keeps_tapes,
    )


def _listed(exists: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """The true columns of each row, ascending, and their numbers."""
    counts = exists.sum(axis=1).astype(np.int64)
    # A stable sort moves the true ones, in order, to the front.
    order = np.argsort(~exists, axis=1, kind="stable")[:, : counts.max()]
    return np.ascontiguousarray(order, dtype=np.int64), counts


def keep_all_memory(p: Problem) -> int:
    """The memory beyond a^0 with which no stage runs more often than the family has to.

    With tapes kept that is the plain sequence `Fall1 ... B1`; without, the one that keeps every layer input.
    """
    c = p.costs
    kept = need = 0
    for s in range(1, p.num_stages + 1):
        if p.keeps_tapes:
            need = max(need, kept + int(c.fall_peak[s] + c.held[-1]), kept + int(c.back_peak[s]))
            kept += int(c.tape[s])
        else:
            forward = int(c.keep_peak[s] + c.held[-1]) if s < p.num_stages else 0
            need = max(need, kept + int(c.held[s] + max(c.leaf_peak[s], c.kept_leaf_peak[s])), kept + forward)
            kept += int(c.output[s])
    return need
