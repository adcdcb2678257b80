from __future__ import annotations

from itertools import pairwise
from math import comb

import pytest
from chain_examples import TOY, chains, homogeneous, plain_peak
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.chain_search import fastest

from lightning_remat.chain import Chain, ChainSequence, replay
from lightning_remat.errors import InfeasibleBudgetError
from lightning_remat.planners import griewank, rotor


def binomial_advances(num_steps: int, num_kept: int) -> int:
    """Griewank's t(l, c) = r l - beta(c + 1, r - 1), beta(c, r) = C(c + r, c), r the least with l <= beta(c, r)."""
    r = next(r for r in range(num_steps + 1) if num_steps <= comb(num_kept + r, num_kept))
    return r * num_steps - (comb(num_kept + r, num_kept + 1) if r else 0)


@pytest.mark.sampled
@pytest.mark.parametrize("slots", [500, None])
@pytest.mark.parametrize("num_kept", [1, 2, 3, 5])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 6, 10, 11, 21, 34])
def test_homogeneous_chains_have_the_binomial_counts(num_stages: int, num_kept: int, slots: int | None):
    # Beside the inputs that are kept, a B holds its own input, its tape and two gradients.
    sequence = griewank.solve(homogeneous(num_stages), num_kept + 4, slots=slots)
    advances = sum(kind in ("Fck", "Fn") for kind, _ in sequence)
    assert advances == binomial_advances(num_stages, num_kept)
    assert sum(kind == "Fall" for kind, _ in sequence) == num_stages


def falls_right_before_backwards(sequence: ChainSequence) -> bool:
    operations = sequence.operations
    return all(b == ("B", a.stage) for a, b in pairwise(operations) if a.kind == "Fall")


@pytest.mark.slow
@pytest.mark.parametrize("floating", [True, False])
@given(chain=chains(), fraction=st.floats(0.3, 1.0))
@settings(deadline=None, max_examples=40)
def test_exact_memory_finds_the_optimum_of_the_search(floating: bool, chain: Chain, fraction: float):
    budget = int(fraction * plain_peak(chain))
    found = fastest(chain, budget, inputs_only=True, persistent=not floating)
    if found is None:
        with pytest.raises(InfeasibleBudgetError):
            griewank.solve(chain, budget, slots=None, floating=floating)
    else:
        sequence = griewank.solve(chain, budget, slots=None, floating=floating)
        measured = replay(chain, sequence)
        assert falls_right_before_backwards(sequence)
        assert measured.makespan == found[0]
        assert measured.peak <= budget


@pytest.mark.parametrize("slots", [500, 10, None])
@given(chain=chains(max_stages=4))
@settings(deadline=None, max_examples=20)
def test_minimum_bytes_is_the_threshold(slots: int | None, chain: Chain):
    with pytest.raises(InfeasibleBudgetError) as error:
        griewank.solve(chain, -1, slots=slots)
    minimum = error.value.minimum_bytes
    assert replay(chain, griewank.solve(chain, minimum, slots=slots)).peak == minimum
    with pytest.raises(InfeasibleBudgetError):
        griewank.solve(chain, minimum - 1, slots=slots)
    assert fastest(chain, minimum - 1, inputs_only=True) is None


@given(chain=chains(max_stages=14, largest=10_000), fraction=st.floats(0.0, 1.2), slots=st.integers(1, 60))
@settings(deadline=None, max_examples=60)
def test_slots_round_so_that_the_budget_holds(chain: Chain, fraction: float, slots: int):
    budget = fraction * plain_peak(chain)
    try:
        sequence = griewank.solve(chain, budget, slots=slots)
    except InfeasibleBudgetError as error:
        assert error.minimum_bytes > budget  # noqa: PT017
    else:
        assert falls_right_before_backwards(sequence)
        assert replay(chain, sequence).peak <= budget
        exact = replay(chain, griewank.solve(chain, budget, slots=None)).makespan
        assert replay(chain, sequence).makespan >= exact
        assert exact >= replay(chain, rotor.solve(chain, budget, slots=None, floating=True)).makespan


def test_an_ample_budget_keeps_every_input():
    sequence = griewank.solve(TOY, float("inf"))
    forward = sum(s.forward_seconds for s in TOY.stages)
    backward = sum(s.backward_seconds for s in TOY.stages)
    assert replay(TOY, sequence).makespan == pytest.approx(2 * forward + backward)
