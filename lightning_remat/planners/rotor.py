"""Optimal rematerialization of heterogeneous chains: beaumont2024's Rotor, memory persistent or floating."""

from __future__ import annotations

from collections.abc import Iterator

from ..chain import Chain, ChainSequence
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ._candidates import Candidate
from ._chain.search import SubFamily, plan_stages, stage_candidates
from ._chain.solver import solve_chain

_PERSISTENT = SubFamily(keeps_tapes=True, floating=False)
_INPUTS_ONLY = SubFamily(keeps_tapes=False, floating=False)


def solve(chain: Chain, budget: float, *, slots: int | None = 500, floating: bool = False) -> ChainSequence:
    """The fastest sequence of `chain` within `budget` among the memory-persistent ones, or among all.

    With `slots=None` optimal: among the memory-persistent sequences (Definition 4.1), or with `floating` among all
    valid ones. With slots, sizes are rounded up to budget / slots, so that the answer may be slower; it fits wherever
    one fits. Cost: O(L^3 slots), with `floating` up to O(L^4 slots); in exact memory not bounded by a polynomial,
    for the problem is NP-complete (Theorem 3.6), yet quick up to some tens of stages.

    Args:
        chain: The stages; the last is the loss.
        budget: Bound on the memory of every operation, in the chain's unit.
        slots: Slots that the budget is divided into; None plans in exact memory.
        floating: Search all sequences that replace activations before their backward's turn too.

    Returns:
        A valid sequence whose replayed peak is at most `budget`.

    Raises:
        InfeasibleBudgetError: No sequence of the family fits; at exactly its `minimum_bytes` one does.
        ValueError: `slots` is not positive.

    Reference:
        Beaumont et al. 2024, Theorem 4.8 with Algorithms 3 and 4; `floating`: Theorem 4.7 with Algorithms 1 and 2,
        where the move of the floating activation is a step of its own, without which an optimum is missed at times.

    >>> from lightning_remat.chain import Stage
    >>> chain = Chain(10, (Stage(10, 40, 1.0, 1.0), Stage(10, 40, 1.0, 1.0), Stage(0, 0, 0.0, 0.0)))
    >>> print(solve(chain, 110))
    Fall1 Fall2 Fall3 B3 B2 B1
    >>> print(solve(chain, 80))
    Fck1 Fall2 Fall3 B3 B2 Fall1 B1
    """
    family = "valid" if floating else "memory-persistent"
    return solve_chain(chain, budget, slots=slots, keeps_tapes=True, floating=floating, family=family)


def plan_rotor(graph: Graph, budget_bytes: int, *, slots: int = 500) -> Schedule:
    """The fastest schedule within the budget that a memory-persistent sequence of the graph's stages gives.

    The graph is cut at its articulation points; between them, a stage is run as a whole, but for what a recomputation
    need not make. Cost: the dynamic program's, and some tens of simulations.

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.
        slots: Slots of memory for chains too long to be planned in exact memory.

    Returns:
        A schedule whose simulated peak is within the budget.

    Raises:
        InfeasibleBudgetError: No sequence fits; carries the lowest simulated peak of the family and its node.
        ValueError: `slots` is not positive.

    Reference:
        Beaumont et al. 2024, section 4.4, Theorem 4.8.
    """
    return plan_stages(
        graph,
        budget_bytes,
        families=(_PERSISTENT,),
        floor_families=(_INPUTS_ONLY,),
        slots=slots,
        planner="rotor",
    )


def rotor_candidates(graph: Graph, *, slots: int = 500) -> Iterator[Candidate]:
    """All the schedules that `plan_rotor` chooses from, with their simulated peaks and seconds."""
    for family in (_PERSISTENT, _INPUTS_ONLY):
        yield from stage_candidates(graph, family, slots)


def plan_rotor_floating(graph: Graph, budget_bytes: int, *, slots: int = 500) -> Schedule:
    """The fastest schedule within the budget that any sequence of the graph's stages gives; see `plan_rotor`.

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.
        slots: Slots of memory for chains too long to be planned in exact memory.

    Returns:
        A schedule whose simulated peak is within the budget.

    Raises:
        InfeasibleBudgetError: No sequence fits; carries the lowest simulated peak of the family and its node.
        ValueError: `slots` is not positive.

    Reference:
        Beaumont et al. 2024, section 4.3, Theorem 4.7.
    """
    both = (False, True)
    return plan_stages(
        graph,
        budget_bytes,
        families=tuple(SubFamily(keeps_tapes=True, floating=floating) for floating in both),
        floor_families=tuple(SubFamily(keeps_tapes=False, floating=floating) for floating in both),
        slots=slots,
        planner="rotor_floating",
    )
