import pytest
from hypothesis import given, settings
from oracles.eviction_reference import Eviction, OutOfMemory
from oracles.node_graphs import node_graphs, relu_chain
from oracles.schedule_search import lowest_peak

from lightning_remat import InfeasibleBudgetError, simulate
from lightning_remat.lowering import apply_liveness, lower_kept
from lightning_remat.planners._eviction import evict, pack_step
from lightning_remat.planners.dtr import plan_dtr
from lightning_remat.schedules.arrays import decode


def budgets(graph, step):
    top = simulate(graph, lower_kept(graph, range(len(graph.nodes)))).peak_bytes
    return range(graph.input_bytes, top + 30, step)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(node_graphs(most=9, views=False))
def test_the_same_evictions_as_the_recursive_reference(graph):
    step = pack_step(graph)
    for budget in budgets(graph, 7):
        actions = evict(step, budget, 1000)
        try:
            expected = Eviction(graph, budget).execute()
        except OutOfMemory:
            assert actions is None
        else:
            assert actions is not None
            assert str(decode(graph, actions)) == " ".join(expected)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(node_graphs(most=10))
def test_every_replay_is_valid_within_its_limit_and_lower_with_liveness(graph):
    step = pack_step(graph)
    for budget in budgets(graph, 5):
        actions = evict(step, budget, 1000)
        if actions is not None:
            schedule = decode(graph, actions)
            online, offline = simulate(graph, schedule), simulate(graph, apply_liveness(graph, schedule))
            assert offline.peak_bytes <= online.peak_bytes <= budget
            assert offline.seconds == online.seconds


@settings(max_examples=20, deadline=None)
@given(node_graphs(most=5))
def test_never_below_the_lowest_peak_of_all_schedules(graph):
    with pytest.raises(InfeasibleBudgetError) as error:
        plan_dtr(graph, 0)
    assert error.value.minimum_bytes >= lowest_peak(graph, is_ordered=False)


def test_enough_memory_recomputes_nothing():
    graph = relu_chain(12)
    assert simulate(graph, plan_dtr(graph, 10**6)).recompute_seconds == 0


def test_a_chain_trades_memory_for_recomputations_far_below_the_plain_peak():
    # 64 values; a quarter of them must suffice at less than twice the forward, half at less than one.
    graph = relu_chain(64)
    assert simulate(graph, plan_dtr(graph, 1600)).recompute_seconds < 128
    assert simulate(graph, plan_dtr(graph, 3200)).recompute_seconds < 64


def test_thrashing_counts_as_failure():
    graph = relu_chain(64)
    assert evict(pack_step(graph), 400, most_runs=64) is None
    assert evict(pack_step(graph), 400, most_runs=10_000) is not None
