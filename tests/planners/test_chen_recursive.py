import math
from collections import Counter

import pytest
from hypothesis import given, settings
from oracles.node_graphs import node_graphs, relu_chain

from lightning_remat import Graph, InfeasibleBudgetError, simulate
from lightning_remat.planners.chen_recursive import _plans, plan_chen_recursive


def floor_of(graph, **options):
    with pytest.raises(InfeasibleBudgetError) as raised:
        plan_chen_recursive(graph, -1, **options)
    return raised.value.minimum_bytes


@pytest.mark.parametrize("count", [8, 16, 32, 64, 128, 256])
def test_one_kept_value_a_level_needs_logarithmic_memory(count):
    graph = relu_chain(count, output_bytes=100)
    least = floor_of(graph, num_kept=1)
    # log2(n) values kept, the one in work, its gradient and that of its input.
    assert least <= 100 * (math.log2(count) + 3)
    # Each level of the recursion runs each node at most once more.
    schedule = plan_chen_recursive(graph, least, num_kept=1)
    runs = Counter(action.node for action in schedule if action.kind == "F")
    assert max(runs.values()) <= math.log2(count) + 1


@pytest.mark.parametrize("num_kept", [1, 2, 3, 7])
def test_k_kept_values_a_level_need_k_times_the_logarithm_to_base_k_plus_1(num_kept):
    count = (num_kept + 1) ** 3
    least = floor_of(relu_chain(count, output_bytes=100), num_kept=num_kept)
    assert least <= 100 * (num_kept * 3 + 3)  # g(n) = k·log_{k+1}(n), equation (3)


def test_one_level_is_the_plan_of_equal_segments():
    schedule = plan_chen_recursive(relu_chain(9), 10**6, num_kept=2, num_levels=1)
    assert str(schedule) == (
        "F0 F1 D0 F2 D1 F3 F4 D3 F5 D4 F6 F7 F8 B8 D8 B7 D7 B6 D6 B5 D5 F3 F4 B4 D4 B3 D3 B2 D2 F0 F1 B1 D1 B0 D0"
    )


@settings(deadline=None)
@given(node_graphs())
def test_planner_fits_or_says_how_low_it_goes(graph):
    least = floor_of(graph)
    assert simulate(graph, plan_chen_recursive(graph, least)).peak_bytes == least
    seconds = [simulate(graph, plan_chen_recursive(graph, least + extra)).seconds for extra in (0, 2, 5, 10, 10**6)]
    assert seconds == sorted(seconds, reverse=True)
    assert simulate(graph, plan_chen_recursive(graph, 10**6)).recompute_seconds == 0


@settings(deadline=None)
@given(node_graphs())
def test_every_plan_of_every_depth_is_valid_with_first_runs_in_order(graph):
    for schedule in _plans(graph, None, None):
        simulate(graph, schedule)
        first = list(dict.fromkeys(action.node for action in schedule if action.kind == "F"))
        assert first == sorted(first)
        backwards = [action.node for action in schedule if action.kind == "B"]
        assert backwards == sorted(backwards, reverse=True)


@pytest.mark.parametrize("option", ["num_kept", "num_levels"])
def test_wrong_options_are_refused(option):
    with pytest.raises(ValueError, match=f"{option} is 0"):
        plan_chen_recursive(relu_chain(3), 10**6, **{option: 0})


@pytest.mark.parametrize("option", ["num_kept", "num_levels"])
def test_options_hold_for_no_operations_as_well(option):
    assert not plan_chen_recursive(Graph(()), 0, **{option: 2}).actions
