from collections import Counter

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
from oracles.node_graphs import node_graphs, relu_chain

from lightning_remat import Graph, InfeasibleBudgetError, Node, simulate
from lightning_remat.planners._lower_sets.canonical import lower_sequence
from lightning_remat.planners.kusumoto import (
    LowerSetProblem,
    cost,
    lower_sets,
    minimum_budget,
    plan_kusumoto_approx,
    plan_kusumoto_exact,
    solve,
)
from lightning_remat.schedules.storages import merge_views

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


@pytest.mark.slow
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


@pytest.mark.slow
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
        (((1, 1), (1, 1), ((0, 1), (1, 0))), "cycle: 0 → 1 → 0"),
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


PLANNERS = [
    pytest.param(planner, objective, liveness, id=f"{planner.__name__}-{objective}-{'live' if liveness else 'parts'}")
    for planner in (plan_kusumoto_exact, plan_kusumoto_approx)
    for objective in ("time", "memory")
    for liveness in (True, False)
]


def floor_of(planner, graph, **options):
    with pytest.raises(InfeasibleBudgetError) as raised:
        planner(graph, -1, **options)
    return raised.value


@pytest.mark.sampled
@pytest.mark.parametrize(("planner", "objective", "liveness"), PLANNERS)
@settings(max_examples=25, deadline=None)
@given(graph=node_graphs())
def test_planner_succeeds_at_its_floor_and_not_below(planner, objective, liveness, graph):
    options = {"objective": objective, "liveness": liveness}
    floor = floor_of(planner, graph, **options)
    assert floor.node in {node.name for node in graph.nodes}
    schedule = planner(graph, floor.minimum_bytes, **options)
    assert simulate(graph, schedule).peak_bytes == floor.minimum_bytes
    runs = Counter(action.node for action in schedule if action.kind == "F")
    assert max(runs.values()) <= 2
    if floor.minimum_bytes:
        with pytest.raises(InfeasibleBudgetError):
            planner(graph, floor.minimum_bytes - 1, **options)


@settings(max_examples=25, deadline=None)
@given(graph=node_graphs())
def test_more_budget_is_never_slower_and_ample_budget_recomputes_nothing(graph):
    for planner in (plan_kusumoto_exact, plan_kusumoto_approx):
        least = floor_of(planner, graph).minimum_bytes
        seconds = [simulate(graph, planner(graph, least + extra)).seconds for extra in (0, 1, 2, 4, 8, 16, 1000)]
        assert seconds == sorted(seconds, reverse=True)
        assert simulate(graph, planner(graph, 10**9)).recompute_seconds == 0


@settings(max_examples=25, deadline=None)
@given(graph=node_graphs())
def test_exact_never_loses_to_approx(graph):
    least = floor_of(plan_kusumoto_approx, graph).minimum_bytes
    for extra in (0, 3, 9):
        exact = simulate(graph, plan_kusumoto_exact(graph, least + extra))
        assert exact.seconds <= simulate(graph, plan_kusumoto_approx(graph, least + extra)).seconds


@pytest.mark.parametrize("count", [16, 64, 144])
def test_planner_needs_about_the_root_of_the_memory_of_a_chain(count):
    graph = relu_chain(count)
    for planner in (plan_kusumoto_exact, plan_kusumoto_approx):
        least = floor_of(planner, graph, objective="memory").minimum_bytes
        assert least <= (2 * count**0.5 + 4) * graph.nodes[0].output_bytes


def test_without_liveness_values_stay_until_their_part_ends():
    graph = relu_chain(6)
    storages = merge_views(graph)
    parts = [0, 0, 0, 1, 1, 1]
    whole = lower_sequence(graph, storages, parts, liveness=False, keeps_last=False)
    assert str(whole) == ("F0 F1 F2 D0 D1 F3 F4 F5 D3 D4 D5 F3 F4 F5 B5 B4 B3 D3 D4 D5 F0 F1 B2 B1 B0 D0 D1 D2")
    live = lower_sequence(graph, storages, parts, liveness=True, keeps_last=False)
    assert str(live).startswith("F0 F1 D0 F2 D1 F3 F4 D3 F5")
    assert sum(simulate(graph, live).memory_bytes) < sum(simulate(graph, whole).memory_bytes)
    assert simulate(graph, live).seconds == simulate(graph, whole).seconds


def test_view_is_part_of_what_it_views():
    relu = {"output_bytes": 100, "forward_seconds": 1.0, "backward_seconds": 1.0}
    nodes = (
        Node("a", inputs=(), saved=(0,), **relu),
        Node("flat", inputs=(0,), storage_of=0, forward_seconds=0.5),
        Node("b", inputs=(), saved=(2,), **relu),
        Node("cut", inputs=(1, 2), storage_of=1),
        Node("c", inputs=(3,), saved=(3, 4), tape_bytes=7, **relu),
    )
    storages = merge_views(Graph(nodes))
    assert storages.owners == (0, 2, 4)
    assert storages.place == (0, 0, 1, 0, 2)
    assert storages.sizes == (100, 100, 107)
    assert storages.seconds == (1.5, 1.0, 1.0)
    assert set(storages.edges) == {(0, 2), (1, 2)}


@pytest.mark.slow
def test_many_independent_branches_narrow_the_search_and_say_so(caplog):
    caplog.set_level("INFO", "lightning_remat")
    relu = {"output_bytes": 100, "forward_seconds": 1.0, "backward_seconds": 2.0}
    branches = [Node(f"branch{n}", "relu", (), (n,), **relu) for n in range(16)]
    graph = Graph((*branches, Node("sum", "sum", tuple(range(16)), (), **relu)))
    schedule = plan_kusumoto_exact(graph, 10**6)
    assert simulate(graph, schedule).recompute_seconds == 0
    assert "more than 12000 lower sets" in caplog.text


@pytest.mark.parametrize("planner", [plan_kusumoto_exact, plan_kusumoto_approx])
def test_planner_refuses_an_unknown_objective(planner):
    with pytest.raises(ValueError, match="objective is 'speed'"):
        planner(relu_chain(3), 10**6, objective="speed")
