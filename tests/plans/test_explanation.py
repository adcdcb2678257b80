"""What is said of a plan is true of it."""

import pytest
from auto_cases import SMALL, budgets, convolutions, minimum
from hypothesis import given, settings
from oracles.node_graphs import node_graphs

from lightning_remat import Graph, plan
from lightning_remat.budget import format_bytes
from lightning_remat.planners._auto.front_search import front_of
from lightning_remat.plans.explanation import explain
from lightning_remat.schedules.floor import find_floor
from lightning_remat.schedules.time_bound import least_recompute_seconds


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(node_graphs(most=9))
def test_no_schedule_found_is_below_the_bounds(graph: Graph) -> None:
    front = front_of(graph, SMALL)
    for peak, seconds in zip(front.peaks, front.seconds, strict=True):
        recomputed = seconds - sum(node.forward_seconds + node.backward_seconds for node in graph.nodes)
        assert least_recompute_seconds(graph, peak) <= recomputed + 1e-6
        assert find_floor(graph).bytes <= peak


def test_the_bound_is_tight_where_only_cheap_values_go() -> None:
    """The linear program proves the local search optimal where three ReLUs with their batch norms are dropped."""
    graph = convolutions()
    front = front_of(graph, SMALL)
    budget = front.peaks[front.seconds.index(front.seconds[-1] + 3 * 1.5)]
    assert plan(graph, budget, effort=SMALL).simulation.recompute_seconds == 3 * 1.5
    assert least_recompute_seconds(graph, budget) == pytest.approx(3 * 1.5)


def test_the_bound_is_infinite_under_the_floor() -> None:
    graph = convolutions()
    assert least_recompute_seconds(graph, find_floor(graph).bytes // 3) == float("inf")


def test_says_what_is_kept_and_recomputed() -> None:
    graph = convolutions()
    said = explain(plan(graph, budgets(graph, 20)[14], effort=SMALL), effort=SMALL)
    assert "keeps every conv2d (12)" in said.decisions
    assert f"of {sum(node.kind == 'relu' for node in graph.nodes)} relu" in said.text
    assert "conv2d" not in "".join(line for line in said.decisions if line.startswith("recomputes"))
    assert graph.nodes[said.floor.node].name in said.text
    assert said.lowest_bytes == minimum(graph)


def test_more_memory_saves_what_the_larger_budget_saves() -> None:
    graph = convolutions()
    low, high = budgets(graph, 20)[5], budgets(graph, 20)[9]
    first, second = (plan(graph, b, effort=SMALL) for b in (low, high))
    said = explain(first, more_bytes=high - low, effort=SMALL)
    assert said.saved_seconds == pytest.approx(first.simulation.seconds - second.simulation.seconds)


def test_the_knee_lies_on_the_front() -> None:
    graph = convolutions()
    said = explain(plan(graph, 10_000, effort=SMALL), effort=SMALL)
    assert said.decisions == ("keeps everything, recomputes nothing",)
    assert plan(graph, said.knee_bytes, effort=SMALL).recompute_overhead == pytest.approx(said.knee_overhead)
    assert said.lowest_bytes < said.knee_bytes < said.plan.plain.peak_bytes


def test_an_empty_plan_has_nothing_to_explain() -> None:
    with pytest.raises(ValueError, match="nothing to explain"):
        explain(plan(Graph(()), 0))


@pytest.mark.slow
def test_a_plan_is_shown_in_one_line() -> None:
    graph = convolutions()
    made = plan(graph, minimum(graph))
    peak, plain = format_bytes(made.peak_bytes), format_bytes(made.plain.peak_bytes)
    assert repr(made) == (
        f"<Plan of auto: peak {peak} of a budget of {peak} (plain {plain}), {made.num_recomputed} recomputations of "
        f"{len(graph.nodes)} operations, +{made.recompute_overhead:.1%} of a step>"
    )
