"""Optimal rematerialization when only the inputs of stages may be kept: Griewank and Walther's, on any chain."""

from __future__ import annotations

from ..chain import Chain, ChainSequence
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ._chain.search import SubFamily, plan_stages
from ._chain.solver import solve_chain


def solve(chain: Chain, budget: float, *, slots: int | None = 500, floating: bool = True) -> ChainSequence:
    """The fastest sequence of `chain` within `budget` that keeps only inputs of stages: `Fall` comes right before `B`.

    With `slots=None` optimal; on a homogeneous chain its forward runs are the binomial numbers. With slots, sizes are
    rounded up to budget / slots. Cost as of `rotor.solve`, from which it differs by keeping no tape.

    Args:
        chain: The stages; the last is the loss.
        budget: Bound on the memory of every operation, in the chain's unit.
        slots: Slots that the budget is divided into; None plans in exact memory.
        floating: Let a later, larger activation replace a kept one before its backward's turn. Without it, only the
            memory-persistent sequences are searched, as in the classical dynamic program.

    Returns:
        A valid sequence whose replayed peak is at most `budget`.

    Raises:
        InfeasibleBudgetError: No such sequence fits; at exactly its `minimum_bytes` one does.
        ValueError: `slots` is not positive.

    Reference:
        Griewank and Walther 2008, section 12.3; Beaumont et al. 2024, section 5.4 (`revolve`), and section 4.3 for
        `floating`.

    >>> from lightning_remat.chain import Stage
    >>> chain = Chain(1, (Stage(1, 1, 1.0, 1.0),) * 3)
    >>> print(solve(chain, 6))
    Fck1 Fck2 Fall3 B3 Fall2 B2 Fall1 B1
    >>> print(solve(chain, 5))
    Fck1 Fn2 Fall3 B3 Fck1 Fall2 B2 Fall1 B1
    """
    family = "inputs-only"
    return solve_chain(chain, budget, slots=slots, keeps_tapes=False, floating=floating, family=family)


def plan_revolve(graph: Graph, budget_bytes: int, *, slots: int = 500, floating: bool = True) -> Schedule:
    """The fastest schedule within the budget that keeps only inputs of the graph's stages between its phases.

    The graph is cut at its articulation points; every stage but the last is recomputed right before its backward, as
    far as that needs it. Cost: the dynamic program's, and some tens of simulations.

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.
        slots: Slots of memory for chains too long to be planned in exact memory.
        floating: As of `solve`.

    Returns:
        A schedule whose simulated peak is within the budget.

    Raises:
        InfeasibleBudgetError: No such schedule fits; carries the lowest simulated peak of the family and its node.
        ValueError: `slots` is not positive.

    Reference:
        Griewank and Walther 2008, section 12.3; Beaumont et al. 2024, section 5.4 (`revolve`).
    """
    kinds = (False, True) if floating else (False,)
    families = tuple(SubFamily(keeps_tapes=False, floating=kind) for kind in kinds)
    return plan_stages(graph, budget_bytes, families=families, slots=slots, planner="revolve")
