"""Stretches of recomputations that the default planner joins where they have a price."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from auto_cases import SMALL, convolutions, minimum
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.node_graphs import node_graphs, priced, relu_chain, varied
from oracles.stretch_search import fewest, stretches
from random_graphs import graphs, schedules

from lightning_remat import Graph, Node, Schedule, simulate
from lightning_remat.lowering import lower_kept
from lightning_remat.planners._auto.front_search import front_of
from lightning_remat.planners._auto.residents import costs_of
from lightning_remat.planners._auto.stretches import stretches_joined
from lightning_remat.planners.auto import plan_auto
from lightning_remat.schedules.arrays import decode, encode
from lightning_remat.schedules.compiled_simulator import Judge
from lightning_remat.schedules.schedule import Action


def runs(schedule: Schedule) -> Counter[Action]:
    return Counter(action for action in schedule if action.kind in "FB")


def with_stretches_joined(graph: Graph, schedule: Schedule, budget_bytes: int) -> Schedule:
    joined = stretches_joined(costs_of(graph), encode(graph, schedule), budget_bytes)
    return decode(graph, joined) if len(joined) else schedule


def every_third_kept(length: int) -> tuple[Graph, Schedule]:
    """A chain whose recomputations are each a stretch of its own."""
    graph = replace(relu_chain(length), outputs=(length - 1,))
    return graph, lower_kept(graph, range(0, length, 2))


def priced_alike(graph: Graph, stretch_price: float) -> Graph:
    return replace(graph, nodes=tuple(replace(node, stretch_price=stretch_price) for node in graph.nodes))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(0, 2**32), st.integers(0, 30))
def test_no_choice_of_groups_leaves_fewer(data: st.DataObject, seed: int, room: int) -> None:
    rng = random.Random(seed)
    graph = priced(varied(data.draw(st.one_of(graphs(), node_graphs(most=9))), rng), rng)
    schedule = data.draw(schedules(graph))
    before = simulate(graph, schedule)
    limit = before.peak_bytes + room
    joined = with_stretches_joined(graph, schedule, limit)
    after = simulate(graph, joined)  # it breaks no rule
    assert after.peak_bytes <= limit
    assert after.seconds <= before.seconds
    assert runs(joined) == runs(schedule)
    least, is_monotone = fewest(graph, schedule, limit)
    assert len(stretches(joined)) >= least
    if is_monotone:  # of two thousand drawn schedules with more than one stretch all but a handful
        assert len(stretches(joined)) == least


def test_with_room_there_is_one_stretch_and_without_there_are_as_many_as_before() -> None:
    graph, schedule = every_third_kept(20)
    assert len(stretches(schedule)) == 9
    one = with_stretches_joined(graph, schedule, 10**6)
    assert len(stretches(one)) == 1
    assert runs(one) == runs(schedule)
    peak = simulate(graph, schedule).peak_bytes
    for budget in range(peak, simulate(graph, one).peak_bytes + 1, 50):
        joined = with_stretches_joined(graph, schedule, budget)
        assert simulate(graph, joined).peak_bytes <= budget
        assert len(stretches(joined)) == fewest(graph, schedule, budget)[0]


def test_a_schedule_above_the_budget_gets_no_higher() -> None:
    graph, schedule = every_third_kept(12)
    joined = with_stretches_joined(graph, schedule, 0)
    assert simulate(graph, joined).peak_bytes == simulate(graph, schedule).peak_bytes


def test_what_a_backward_on_the_way_reads_is_not_made_twice() -> None:
    """Node a is there for the backward of c, goes, and is made again for that of b."""
    cost = {"output_bytes": 1, "forward_seconds": 1.0, "backward_seconds": 1.0}
    graph = Graph(
        (
            Node("a", **cost),
            Node("b", inputs=(0,), saved=(0,), **cost),
            Node("c", inputs=(1,), saved=(0,), **cost),
            Node("d", inputs=(2,), saved=(2,), **cost),
            Node("e", inputs=(3,), **cost),
        )
    )
    schedule = Schedule.parse("F0 F1 F2 F3 D2 F4 D3 B4 D4 F2 D1 B3 D2 B2 D0 F0 B1 D0 B0")
    assert len(stretches(schedule)) == 2
    assert with_stretches_joined(graph, schedule, 10**6) == schedule


def test_what_is_run_twice_for_others_is_run_one_after_the_other() -> None:
    """Both stretches make node a again for themselves alone."""
    cost = {"output_bytes": 1, "forward_seconds": 1.0, "backward_seconds": 1.0}
    graph = Graph(
        (
            Node("a", **cost),
            Node("b", inputs=(0,), saved=(1,), **cost),
            Node("c", inputs=(0, 1), saved=(2,), **cost),
            Node("d", inputs=(2,), **cost),
        ),
        outputs=(3,),
    )
    schedule = Schedule.parse("F0 F1 F2 D0 D1 F3 D2 D3 B3 F0 F1 F2 D0 D1 B2 D2 F0 F1 D0 B1 D1 B0")
    assert len(stretches(schedule)) == 2
    joined = with_stretches_joined(graph, schedule, simulate(graph, schedule).peak_bytes + 1)
    assert str(joined) == "F0 F1 F2 D0 D1 F3 D2 D3 B3 F0 F1 F2 D0 D1 F0 F1 D0 B2 D2 B1 D1 B0"
    simulate(graph, joined)


def test_where_nothing_has_a_price_nothing_is_joined() -> None:
    graph = convolutions()
    front = front_of(graph, SMALL)
    for budget in range(minimum(graph), 4000, 300):
        found = front.within(budget)
        assert found is not None
        assert plan_auto(graph, budget, effort=SMALL) == front.schedule(found)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(node_graphs(least=4, most=10), st.integers(0, 2**32))
def test_what_the_front_tells_is_what_is_answered(graph: Graph, seed: int) -> None:
    graph = priced(graph, random.Random(seed))
    front, judge = front_of(graph, SMALL), Judge(graph)
    for peak, seconds in zip(front.peaks, front.seconds, strict=True):
        for budget in (peak, peak + 1):
            found = front.within(budget)
            assert found is not None
            answered = judge.cost(plan_auto(graph, budget, effort=SMALL))
            assert answered.peak_bytes <= budget
            assert answered.seconds == front.seconds[found] <= seconds


def test_stretches_are_few_where_they_are_dear() -> None:
    graph = convolutions()
    dear = priced_alike(graph, 4.0)
    front = front_of(graph, SMALL)
    budgets = range(minimum(graph), 4000, 150)
    before = sum(len(stretches(front.schedule(front.within(budget) or 0))) for budget in budgets)
    after = sum(len(stretches(plan_auto(dear, budget, effort=SMALL))) for budget in budgets)
    assert after < before * 3 / 4
