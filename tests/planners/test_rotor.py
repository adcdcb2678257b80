from __future__ import annotations

from itertools import pairwise

import pytest
from chain_examples import TOY, TOY_SEQUENCE, chains, figure_4, plain_peak
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.chain_search import fastest

from lightning_remat.chain import Chain, ChainSequence, Stage, replay
from lightning_remat.errors import InfeasibleBudgetError
from lightning_remat.planners import rotor

SLOTS = [500, None]


@pytest.mark.slow
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("floating", [False, True])
def test_the_papers_toy_example_gives_the_printed_sequence(slots: int | None, floating: bool):
    sequence = rotor.solve(TOY, 90, slots=slots, floating=floating)
    assert str(sequence) == TOY_SEQUENCE
    assert replay(TOY, sequence) == pytest.approx((47.42, 86.75), abs=1e-9)


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize(("n", "floating", "persistent"), [(3, 7, 7), (4, 10, 10), (5, 12, 13)])
def test_figure_4_needs_a_floating_activation(n: int, floating: int, persistent: int, slots: int | None):
    chain = figure_4(n)
    assert replay(chain, rotor.solve(chain, 15, slots=slots, floating=True)).makespan == floating
    assert replay(chain, rotor.solve(chain, 15, slots=slots)).makespan == persistent


def test_the_floating_activation_moves_right_before_a_fall():
    # Equation (2) as printed has no finite value for s < t = l: its optimum is 37 here.
    rows = ((1, 4, 3, 1), (4, 8, 2, 1), (3, 4, 1, 1), (4, 7, 4, 1), (3, 4, 1, 1))
    chain = Chain(0, tuple(Stage(*row) for row in rows))
    found = fastest(chain, 17)
    assert found is not None
    assert found[0] == replay(chain, rotor.solve(chain, 17, slots=None, floating=True)).makespan == 34


@pytest.mark.slow
@pytest.mark.parametrize("floating", [False, True])
@given(chain=chains(), fraction=st.floats(0.3, 1.0))
@settings(deadline=None, max_examples=40)
def test_exact_memory_finds_the_optimum_of_the_search(floating: bool, chain: Chain, fraction: float):
    budget = int(fraction * plain_peak(chain))
    found = fastest(chain, budget, persistent=not floating)
    if found is None:
        with pytest.raises(InfeasibleBudgetError) as error:
            rotor.solve(chain, budget, slots=None, floating=floating)
        assert error.value.minimum_bytes > budget
    else:
        measured = replay(chain, rotor.solve(chain, budget, slots=None, floating=floating))
        assert measured.makespan == found[0]
        assert measured.peak <= budget


@pytest.mark.sampled
@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize("slots", [500, 10, None])
@given(chain=chains(max_stages=4))
@settings(deadline=None, max_examples=20)
def test_minimum_bytes_is_the_threshold(floating: bool, slots: int | None, chain: Chain):
    with pytest.raises(InfeasibleBudgetError) as error:
        rotor.solve(chain, -1, slots=slots, floating=floating)
    minimum = error.value.minimum_bytes
    assert replay(chain, rotor.solve(chain, minimum, slots=slots, floating=floating)).peak == minimum
    with pytest.raises(InfeasibleBudgetError):
        rotor.solve(chain, minimum - 1, slots=slots, floating=floating)
    assert fastest(chain, minimum, persistent=not floating) is not None
    assert fastest(chain, minimum - 1, persistent=not floating) is None


def test_the_error_carries_its_facts():
    with pytest.raises(InfeasibleBudgetError, match=r"fits in 60: the least budget is 82\.12, set by B3") as error:
        rotor.solve(TOY, 60)
    assert (error.value.minimum_bytes, error.value.budget_bytes, error.value.node) == (82.12, 60, "B3")
    assert replay(TOY, rotor.solve(TOY, 82.12)).peak == 82.12
    with pytest.raises(InfeasibleBudgetError):
        rotor.solve(TOY, 82.11)


@pytest.mark.slow
@pytest.mark.parametrize("floating", [False, True])
@given(chain=chains(max_stages=14, largest=10_000), fraction=st.floats(0.0, 1.1), slots=st.integers(1, 60))
@settings(deadline=None, max_examples=60)
def test_slots_round_so_that_the_budget_holds(floating: bool, chain: Chain, fraction: float, slots: int):
    budget = fraction * plain_peak(chain)
    try:
        sequence = rotor.solve(chain, budget, slots=slots, floating=floating)
    except InfeasibleBudgetError as error:
        with pytest.raises(InfeasibleBudgetError) as exact:
            rotor.solve(chain, budget, slots=None, floating=floating)
        assert exact.value.minimum_bytes == error.minimum_bytes > budget  # noqa: PT017
    else:
        measured = replay(chain, sequence)
        assert measured.peak <= budget
        assert measured.makespan >= replay(chain, rotor.solve(chain, budget, slots=None, floating=floating)).makespan


@given(chain=chains(max_stages=12), fraction=st.floats(0.0, 1.0))
@settings(deadline=None, max_examples=60)
def test_slots_of_one_unit_are_exact(chain: Chain, fraction: float):
    # Budgets below 500 units: 500 slots are finer than the unit.
    budget = int(fraction * plain_peak(chain))
    for floating in (False, True):
        try:
            exact = replay(chain, rotor.solve(chain, budget, slots=None, floating=floating))
        except InfeasibleBudgetError:
            continue
        assert replay(chain, rotor.solve(chain, budget, slots=500, floating=floating)).makespan == exact.makespan


@pytest.mark.slow
@given(chain=chains(max_stages=10, largest=30))
@settings(deadline=None, max_examples=30)
def test_more_memory_is_never_slower_and_floating_never_loses(chain: Chain):
    before = float("inf")
    for budget in range(0, int(plain_peak(chain)) + 1, 7):
        try:
            floating = replay(chain, rotor.solve(chain, budget, slots=None, floating=True)).makespan
            persistent = replay(chain, rotor.solve(chain, budget, slots=None)).makespan
        except InfeasibleBudgetError:
            continue
        assert floating <= persistent
        assert floating <= before
        before = floating


def test_an_ample_budget_recomputes_nothing():
    for budget in (107, 1e9, float("inf")):
        assert replay(TOY, rotor.solve(TOY, budget)).makespan == pytest.approx(37.38)


def test_sizes_of_any_precision_and_magnitude():
    chain = Chain(0.1 + 0.2, (Stage(1 / 3, 0.7, 1, 1), Stage(2 / 3, 0.9, 1, 1), Stage(1e-9, 0.1, 1, 1)))
    with pytest.raises(InfeasibleBudgetError) as error:
        rotor.solve(chain, 0.5, slots=None)
    minimum = error.value.minimum_bytes
    for slots in (500, None):
        assert replay(chain, rotor.solve(chain, minimum, slots=slots)).peak <= minimum
    huge = Chain(1 << 60, (Stage((1 << 61) + 1, 1 << 62, 1, 1),) * 3)
    with pytest.raises(InfeasibleBudgetError) as error:
        rotor.solve(huge, 1)
    assert replay(huge, rotor.solve(huge, error.value.minimum_bytes)).peak <= error.value.minimum_bytes


def test_a_single_stage_and_a_free_loss():
    assert rotor.solve(Chain(0, (Stage(0, 0, 0, 0),)), 0) == ChainSequence.parse("Fall1 B1")


def test_slots_must_be_positive():
    with pytest.raises(ValueError, match="slots is 0"):
        rotor.solve(TOY, 90, slots=0)


@pytest.mark.slow
def test_a_chain_of_339_stages_fits_its_budget():
    sizes = [(7919 * i) % 1000 + 1 for i in range(340)]
    stages = tuple(Stage(1000 * a, 1000 * (2 * a + b), a, 2 * b) for a, b in pairwise(sizes))
    chain = Chain(1000, stages)
    budget = 0.2 * plain_peak(chain)
    measured = replay(chain, rotor.solve(chain, budget, slots=100))
    assert len(stages) == 339
    assert 0.75 * budget < measured.peak <= budget
