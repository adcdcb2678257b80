import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.lower_set_search import (
    cost_of,
    every_lower_set,
    every_pruned_lower_set,
    every_sequence,
    lower_set_problems,
)

from lightning_remat import InfeasibleBudgetError
from lightning_remat.planners.kusumoto import LowerSetProblem, cost, lower_sets, minimum_budget, solve

FAMILIES = {"all": every_lower_set, "pruned": every_pruned_lower_set}


def chain(count):
    return LowerSetProblem((1,) * count, (1,) * count, tuple((v, v + 1) for v in range(count - 1)))


@given(lower_set_problems(most=8))
def test_enumeration_finds_every_lower_set(instance):
    times, memories, edges = instance
    problem = LowerSetProblem(tuple(times), tuple(memories), tuple(edges))
    for family, oracle in FAMILIES.items():
        found = lower_sets(problem, family)
        expected = oracle(len(times), edges)
        assert len(found) == len(expected)
        assert set(found) == set(expected)
        assert [len(s) for s in found] == sorted(len(s) for s in found)


@given(lower_set_problems(most=5), st.data())
def test_cost_follows_equations_1_and_2(instance, data):
    times, memories, edges = instance
    problem = LowerSetProblem(tuple(times), tuple(memories), tuple(edges))
    sequence = data.draw(st.sampled_from(list(every_sequence(every_lower_set(len(times), edges)))))
    assert cost(problem, list(sequence)) == cost_of(times, memories, edges, sequence)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(instance=lower_set_problems(most=6))
def test_both_objectives_equal_exhaustive_search_at_every_budget(family, instance):
    times, memories, edges = instance
    problem = LowerSetProblem(tuple(times), tuple(memories), tuple(edges))
    family_sets = FAMILIES[family](len(times), edges)
    costs = {cost_of(times, memories, edges, s) for s in every_sequence(family_sets)}
    peaks = sorted({peak for _, peak in costs})
    assert minimum_budget(problem, family) == peaks[0]
    if peaks[0] > 0:
        with pytest.raises(InfeasibleBudgetError) as raised:
            solve(problem, peaks[0] - 1, lower_sets=family)
        assert raised.value.minimum_bytes == peaks[0]
    for budget in peaks:
        overheads = [overhead for overhead, peak in costs if peak <= budget]
        for objective, best in (("time", min(overheads)), ("memory", max(overheads))):
            sequence = solve(problem, budget, lower_sets=family, objective=objective)
            overhead, peak = cost(problem, sequence)
            assert set(sequence) <= set(family_sets)
            assert peak <= budget
            assert overhead == best


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(lower_set_problems(most=8))
def test_least_overhead_equals_exhaustive_search_on_larger_graphs(instance):
    times, memories, edges = instance
    problem = LowerSetProblem(tuple(times), tuple(memories), tuple(edges))
    family = every_lower_set(len(times), edges)
    if len(family) > 40:
        return
    costs = {cost_of(times, memories, edges, s) for s in every_sequence(family)}
    for budget in sorted({peak for _, peak in costs}):
        sequence = solve(problem, budget)
        assert cost(problem, sequence).overhead == min(overhead for overhead, peak in costs if peak <= budget)


@given(lower_set_problems(most=6), st.floats(0.01, 3.0))
@settings(deadline=None)
def test_memories_that_are_no_integers_keep_the_threshold(instance, scale):
    times, memories, edges = instance
    problem = LowerSetProblem(tuple(times), tuple(m * scale + 0.1 for m in memories), tuple(edges))
    least = minimum_budget(problem)
    assert cost(problem, solve(problem, least)).peak == pytest.approx(least, rel=1e-12)
    with pytest.raises(InfeasibleBudgetError) as raised:
        solve(problem, least * (1 - 1e-9))
    assert raised.value.minimum_bytes == least


@pytest.mark.parametrize("count", [16, 64, 144])
def test_a_chain_of_equal_nodes_needs_about_the_root_of_its_length(count):
    # k parts of length l: k - 1 cached, 2·l for the part, 2 for its reader and that reader's gradient partner.
    best = min((-(-count // length) - 1) + 2 * length + 2 for length in range(1, count + 1))
    assert minimum_budget(chain(count)) <= best
    assert minimum_budget(chain(count)) >= 2 * count**0.5


def test_an_ample_budget_caches_every_node_that_is_read():
    sequence = solve(chain(6), float("inf"))
    assert cost(chain(6), sequence).overhead == 1  # only the sink is in no boundary
    assert cost(chain(6), solve(chain(6), float("inf"), objective="memory")).overhead == 6


def test_graph_with_several_sinks_ends_with_all_nodes():
    problem = LowerSetProblem((1, 1, 1), (1, 1, 1), ((0, 1), (0, 2)))
    assert lower_sets(problem, "pruned")[-1] == frozenset({0, 1, 2})
    assert solve(problem, 10, lower_sets="pruned")[-1] == frozenset({0, 1, 2})


def test_empty_graph_has_the_empty_sequence():
    assert solve(LowerSetProblem((), (), ()), 0) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1,), (1, 2), ()), "1 times but 2 memories"),
        (((1, -1), (1, 1), ()), r"times\[1\] is -1"),
        (((1, 1), (1, 1), ((0, 2),)), r"edge \(0, 2\)"),
        (((1, 1), (1, 1), ((0, 1), (1, 0))), "cycle through 2 of 2"),
    ],
)
def test_wrong_problems_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LowerSetProblem(*arguments)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ([{1}, {0, 1, 2}], "no lower set"),
        ([{0, 1}, {0}, {0, 1, 2}], "strictly contain"),
        ([{0}], "ends with 1 of 3"),
    ],
)
def test_wrong_sequences_are_refused(sequence, message):
    with pytest.raises(ValueError, match=message):
        cost(chain(3), [frozenset(s) for s in sequence])


def test_too_many_lower_sets_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match="pruned"):
        solve(LowerSetProblem((1,) * 30, (1,) * 30, ()), 100)


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="objective is 'speed'"):
        solve(chain(2), 9, objective="speed")
    with pytest.raises(ValueError, match="lower_sets is 'some'"):
        solve(chain(2), 9, lower_sets="some")
