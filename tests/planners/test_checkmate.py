import itertools
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.node_graphs import node_graphs, relu_chain
from oracles.schedule_search import fastest, lowest_peak

from lightning_remat import Graph, InfeasibleBudgetError, Schedule, simulate
from lightning_remat.lowering import apply_liveness, lower_kept
from lightning_remat.planners._checkmate import relaxation
from lightning_remat.planners._checkmate.node_groups import coarsen, group_nodes
from lightning_remat.planners._checkmate.residency import lower_residency
from lightning_remat.planners.checkmate import plan_checkmate


@settings(max_examples=40, deadline=None)
@given(node_graphs(most=5), st.integers(0, 12))
@pytest.mark.slow
def test_integer_program_equals_the_search_over_all_schedules(graph, extra):
    floor = lowest_peak(graph)
    with pytest.raises(InfeasibleBudgetError) as error:
        plan_checkmate(graph, floor - 1, method="milp")
    assert error.value.minimum_bytes == floor
    found = simulate(graph, plan_checkmate(graph, floor + extra, method="milp"))
    assert found.peak_bytes <= floor + extra
    assert found.recompute_seconds == pytest.approx(fastest(graph, floor + extra))


@settings(max_examples=15, deadline=None)
@given(node_graphs(most=4))
def test_one_ordered_run_a_step_is_no_loss_on_tiny_graphs(graph):
    floor = lowest_peak(graph)
    assert lowest_peak(graph, is_ordered=False) == floor
    assert fastest(graph, floor, is_ordered=False) == fastest(graph, floor)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(node_graphs(least=3, most=9))
def test_relaxation_never_beats_the_integer_program_and_keeps_to_every_budget(graph):
    with pytest.raises(InfeasibleBudgetError) as error:
        plan_checkmate(graph, 0)
    floor = error.value.minimum_bytes
    with pytest.raises(InfeasibleBudgetError):
        plan_checkmate(graph, floor - 1)
    slower = float("inf")
    for budget in range(floor, floor + 30, 6):
        found = simulate(graph, plan_checkmate(graph, budget))
        assert found.peak_bytes <= budget
        assert found.seconds <= slower
        slower = found.seconds
        exact = simulate(graph, plan_checkmate(graph, budget, method="milp"))
        assert exact.seconds <= found.seconds + 1e-9


@pytest.mark.slow
def test_a_value_is_recomputed_many_times_where_memory_is_short():
    # Ten equal operations within four values, gradients included: some node must run more than twice.
    graph = relu_chain(10)
    schedule = plan_checkmate(graph, 400, method="milp")
    runs = [sum(a.kind == "F" and a.node == n for a in schedule) for n in range(10)]
    assert max(runs) >= 3


@pytest.mark.slow
def test_time_limit_returns_the_best_found_and_says_so(caplog):
    graph = relu_chain(60)
    with caplog.at_level(logging.WARNING):
        schedule = plan_checkmate(graph, 2500, method="milp", time_limit=2.0)
    found = simulate(graph, schedule)
    assert found.peak_bytes <= 2500
    assert "not proven optimal" in caplog.text
    # No slower than the roundings that need no solver: the best of all that was found is returned.
    assert found.seconds <= simulate(graph, plan_checkmate(graph, 2500, time_limit=1e-9)).seconds


def test_a_sweep_cut_short_is_not_remembered(monkeypatch, caplog):
    """On a machine that is busy once, the same question has its full answer the next time."""
    uneven = (replace(node, output_bytes=10 + 37 * n * n % 61) for n, node in enumerate(relu_chain(8).nodes))
    graph = Graph(tuple(replace(node, forward_seconds=1 + 17 * n * n % 13) for n, node in enumerate(uneven)))
    late = itertools.chain([0.0], itertools.repeat(61.0))
    with monkeypatch.context() as busy:
        busy.setattr(relaxation, "time", SimpleNamespace(monotonic=lambda: next(late)))
        few = relaxation.sweep(graph, 60.0, None, progress=False)
    assert "after 0 of 7 memory limits" in caplog.text
    caplog.clear()
    everything = relaxation.sweep(graph, 60.0, None, progress=False)
    assert "memory limits" not in caplog.text
    assert everything[0].seconds < few[0].seconds


def test_a_sweep_cut_short_says_so_every_time(caplog):
    graph = relu_chain(12, output_bytes=77)
    for _ in range(2):
        caplog.clear()
        schedule = plan_checkmate(graph, 10**6, time_limit=1e-9)
        assert simulate(graph, schedule).recompute_seconds == 0
        assert "after 0 of 7 memory limits; the answer is not proven optimal" in caplog.text


def test_an_answer_proven_optimal_says_nothing(caplog):
    plan_checkmate(relu_chain(6), 500, method="milp")
    assert "memory limits" not in caplog.text


def test_progress_is_printed(capsys):
    plan_checkmate(relu_chain(7, output_bytes=64), 10**6, progress=True)
    assert "relaxation 7 of 7" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong", [{"method": "simplex"}, {"time_limit": 0}, {"most_stages": 0}], ids=["method", "time_limit", "most_stages"]
)
def test_mistakes_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        plan_checkmate(relu_chain(3), 10**6, **wrong)


@pytest.mark.slow
def test_large_graphs_are_planned_in_groups():
    graph = relu_chain(700)
    plain = simulate(graph, lower_kept(graph, range(700)))
    found = simulate(graph, plan_checkmate(graph, 20_000, most_stages=6))
    assert found.peak_bytes <= 20_000 < plain.peak_bytes
    assert found.recompute_seconds < 700


@settings(max_examples=60, deadline=None)
@given(node_graphs(least=4, most=12), st.integers(1, 6))
def test_groups_partition_the_nodes_and_account_for_every_byte_kept(graph, most):
    groups = group_nodes(graph, most)
    assert [n for group in groups for n in group] == list(range(len(graph.nodes)))
    assert len(groups) <= max(most, 1)
    coarse, (before, highest), shared = coarsen(graph, groups)
    assert len(coarse.nodes) == len(before) == len(highest) == len(shared) == len(groups)
    kept = sum(node.output_bytes + node.tape_bytes for node in coarse.nodes)
    assert kept <= sum(node.output_bytes + node.tape_bytes for node in graph.nodes)


@settings(max_examples=100, deadline=None)
@given(node_graphs(least=2, most=8), st.data())
def test_any_residency_becomes_a_valid_schedule(graph, data):
    count = len(graph.nodes)
    groups = group_nodes(graph, data.draw(st.integers(1, count)))
    subsets = st.sets(st.integers(0, count - 1))
    outputs = [data.draw(subsets) for _ in range(2 * len(groups))]
    outputs = [{n for n in range(count) if graph.roots[n] in step} for step in outputs]
    tapes = [data.draw(subsets) for _ in range(2 * len(groups))]
    is_eager = data.draw(st.booleans())
    simulate(graph, lower_residency(graph, outputs, tapes, groups=groups, is_eager=is_eager))


def test_a_run_for_its_tape_alone_does_not_keep_the_output():
    # Liveness: F1 runs again for its tape only; the output, unused between, is dropped and made anew.
    graph = relu_chain(2)
    node = graph.nodes[1]
    taped = type(node)("dropout", "dropout", (0,), (), output_bytes=100, tape_bytes=10)
    graph = type(graph)((graph.nodes[0], taped))
    schedule = apply_liveness(graph, Schedule.parse("F0 F1 T1 F1 B1 D1 T1 B0 D0"))
    assert str(schedule) == "F0 F1 T1 D1 F1 D1 B1 T1 B0 D0"
    simulate(graph, schedule)
