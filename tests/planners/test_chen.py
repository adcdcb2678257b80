import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.node_graphs import node_graphs, relu_chain

from lightning_remat import InfeasibleBudgetError, simulate
from lightning_remat.planners.chen import _every_plan, plan_chen, search, solve
from lightning_remat.schedules.edges import articulation_points

sizes_and_candidates = st.lists(st.integers(0, 9), min_size=1, max_size=12).flatmap(
    lambda sizes: st.tuples(st.just(sizes), st.sets(st.integers(0, len(sizes) - 1)))
)


def test_algorithm_3_by_hand():
    # temp: 3 | 3+1=4 > 3 at node 1: cut | 2, 2+2=4 at node 3: cut | 5 at node 4, no candidate | 5+1=6 at node 5: cut
    assert solve([3, 1, 2, 2, 5, 1], {1, 3, 5}, 3) == (1 + 2 + 1, 6, (1, 0, 1, 0, 1, 0))
    assert solve([3, 1, 2, 2, 5, 1], {1, 3, 5}, 4) == (2 + 1, 8, (1, 1, 1, 0, 1, 0))  # 4 is not more than 4


def test_what_follows_the_last_cut_counts_in_neither_x_nor_y():
    assert solve([1, 1, 9, 9], {1}, 0) == (1, 2, (1, 0, 1, 1))
    assert solve([1, 1], (), 0) == (0, 0, (1, 1))


@pytest.mark.parametrize("count", [16, 64, 256, 1024])
def test_equal_chain_costs_about_twice_the_root_of_its_length(count):
    best = min(plan.x + plan.y for plan in search([1] * count, range(count)))
    assert best <= 2 * math.sqrt(count) + 2
    assert best >= 2 * math.sqrt(count) - 2


@given(sizes_and_candidates, st.integers(0, 60))
def test_sweep_finds_the_plan_of_every_budget(case, budget):
    sizes, candidates = case
    assert solve(sizes, candidates, budget) in set(_every_plan(sizes, candidates))


@given(st.integers(1, 8), st.randoms(use_true_random=False))
def test_articulation_points_equal_removal(count, rng):
    edges = [(a, b) for b in range(count) for a in range(b) if rng.random() < 0.35]

    def num_parts(nodes):
        nodes, parts = set(nodes), 0
        while nodes:
            parts += 1
            stack = [nodes.pop()]
            while stack:
                v = stack.pop()
                for a, b in edges:
                    for w in {a, b} - {v} if v in (a, b) else ():
                        if w in nodes:
                            nodes.discard(w)
                            stack.append(w)
        return parts

    whole = num_parts(range(count))
    isolated = {v for v in range(count) if not any(v in e for e in edges)}
    expected = {v for v in range(count) if v not in isolated and num_parts(set(range(count)) - {v}) > whole}
    assert articulation_points(count, edges) == expected


@given(node_graphs(), st.floats(0, 1.2))
def test_planner_fits_or_says_how_low_it_goes(graph, share):
    with pytest.raises(InfeasibleBudgetError) as raised:
        plan_chen(graph, -1)
    least = raised.value.minimum_bytes
    assert simulate(graph, plan_chen(graph, least)).peak_bytes == least
    if least:
        with pytest.raises(InfeasibleBudgetError):
            plan_chen(graph, least - 1)
    plain = simulate(graph, plan_chen(graph, 10**9))
    assert plain.recompute_seconds == 0
    budget = least + int(share * (plain.peak_bytes - least))
    assert simulate(graph, plan_chen(graph, budget)).seconds >= plain.seconds


@pytest.mark.parametrize("count", [16, 64, 256])
def test_planner_needs_about_the_root_of_the_memory_of_a_chain(count):
    graph = relu_chain(count)
    with pytest.raises(InfeasibleBudgetError) as raised:
        plan_chen(graph, 0)
    size = graph.nodes[0].output_bytes
    assert raised.value.minimum_bytes <= (2 * math.sqrt(count) + 4) * size + graph.input_bytes + graph.static_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, -1], {0}, 0), r"sizes\[1\] is -1"),
        (([1, 1], {2}, 0), "candidate 2"),
        (([1, 1], {0}, -1), "budget is -1"),
    ],
)
def test_wrong_problems_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        solve(*arguments)


def test_more_budget_is_never_slower():
    rng = random.Random(3)
    graph = relu_chain(40)
    with pytest.raises(InfeasibleBudgetError) as raised:
        plan_chen(graph, 0)
    least = raised.value.minimum_bytes
    budgets = sorted(least + rng.randrange(4000) for _ in range(20))
    seconds = [simulate(graph, plan_chen(graph, b)).seconds for b in budgets]
    assert seconds == sorted(seconds, reverse=True)
