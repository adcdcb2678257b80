import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.node_graphs import relu_chain
from oracles.stored_subsets import cheapest, cost_of

from lightning_remat import InfeasibleBudgetError, simulate
from lightning_remat.planners._division_tree import divide
from lightning_remat.planners.feng import plan_feng, solve


@st.composite
def computation_graphs(draw, most=9):
    """One source, one target, everything between them; sparse enough for every kind of closed set."""
    n = draw(st.integers(2, most))
    rng = random.Random(draw(st.integers(0, 2**32)))
    density = draw(st.sampled_from([0.0, 0.1, 0.25, 0.5]))
    edges = {(rng.randrange(max(0, v - draw(st.sampled_from([1, 3, n]))), v), v) for v in range(1, n)}
    edges |= {(a, b) for b in range(n) for a in range(b) if rng.random() < density}
    edges |= {(v, rng.randrange(v + 1, n)) for v in range(n - 1) if all(a != v for a, _ in edges)}
    costs = [rng.choice([0, 1, 2, 3, 5, 8, 13]) for _ in range(n)]
    return costs, sorted(edges)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(computation_graphs())
def test_optimum_of_equation_1_over_all_stored_subsets(problem):
    costs, edges = problem
    found = solve(costs, edges)
    assert found.cost == cheapest(costs, edges)
    assert found.cost == cost_of(costs, edges, set(found.stored))
    assert sorted([*found.stored, *(v for segment in found.segments for v in segment)]) == list(range(len(costs)))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(computation_graphs(), st.floats(0.1, 10))
def test_costs_need_not_be_whole_numbers(problem, unit):
    costs, edges = problem
    costs = [c * unit for c in costs]
    assert solve(costs, edges).cost == pytest.approx(cheapest(costs, edges))


@settings(max_examples=50, deadline=None)
@given(computation_graphs(), st.randoms())
def test_numbering_does_not_matter(problem, rng):
    costs, edges = problem
    names = list(range(len(costs)))
    rng.shuffle(names)
    renamed = {names[v]: cost for v, cost in enumerate(costs)}
    found = solve([renamed[v] for v in range(len(costs))], [(names[a], names[b]) for a, b in edges])
    assert found.cost == solve(costs, edges).cost


@pytest.mark.parametrize("k", [2, 3, 5, 8])
def test_equal_chain_costs_two_roots(k):
    # k segments of k - 1 inner vertices: k + 1 stored and k - 1 re-forwarded, the paper's 2·√N.
    length = k * k + 1
    assert solve([1] * length, [(i, i + 1) for i in range(length - 1)]).cost == 2 * k


def test_mesh_without_cuts_divides_into_its_largest_closed_sets():
    # Figure 4 (c): four corners 0, 1, 2, 8, and between each of these pairs a chain of one vertex.
    pairs = [(0, 1), (0, 2), (1, 2), (1, 8), (2, 8)]
    tree = divide(9, [edge for v, (a, b) in enumerate(pairs, 3) for edge in ((a, v), (v, b))])
    assert tree[0].division == "maximal_split"
    assert tree[0].endpoints == (1, 2)
    assert sorted((tree[m].source, tree[m].target) for m in tree[0].members) == pairs


def test_single_branches_are_segments_of_their_own():
    # Two branches of 6 between 0 and 3: run again one after the other, they cost 6, not 12.
    found = solve([1, 6, 6, 1], [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert found == ((0, 3), (frozenset({1}), frozenset({2})), 8)


@pytest.mark.parametrize(
    ("costs", "edges", "words"),
    [
        ([1, 1], [(0, 1), (1, 0)], "cycle"),
        ([1, 1, 1], [(0, 2), (1, 2)], "exactly one"),
        ([1, -1], [(0, 1)], "not negative"),
        ([1, math.nan], [(0, 1)], "not negative"),
        ([1, 1], [(0, 2)], r"edge \(0, 2\) names a node that does not exist"),
    ],
)
def test_mistakes_are_named(costs, edges, words):
    with pytest.raises(ValueError, match=words):
        solve(costs, edges)


def test_one_vertex():
    assert solve([7], []) == ((0,), (), 7)


def test_chain_of_16_plans_down_to_two_roots():
    graph = relu_chain(16)
    plain = simulate(graph, plan_feng(graph, 10**9))
    assert plain.recompute_seconds == 0
    with pytest.raises(InfeasibleBudgetError) as error:
        plan_feng(graph, 100)
    assert error.value.minimum_bytes <= 900 < plain.peak_bytes
    assert simulate(graph, plan_feng(graph, error.value.minimum_bytes)).peak_bytes == error.value.minimum_bytes
