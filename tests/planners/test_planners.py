"""The contract of every planner, by the simulator's word: fits the budget, or says how low it can go and why."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from oracles.node_graphs import node_graphs
from random_graphs import graphs

from lightning_remat import PLANNERS, Graph, InfeasibleBudgetError, Node, Schedule, Simulation, plan, simulate
from lightning_remat.lowering import lower_kept

VARIANTS = {
    **PLANNERS,
    "kusumoto_exact memory": partial(PLANNERS["kusumoto_exact"], objective="memory"),
    "kusumoto_exact parts": partial(PLANNERS["kusumoto_exact"], liveness=False),
    "kusumoto_approx memory": partial(PLANNERS["kusumoto_approx"], objective="memory"),
    "kusumoto_approx parts": partial(PLANNERS["kusumoto_approx"], liveness=False),
    "checkmate milp": partial(PLANNERS["checkmate"], method="milp"),
}
# Whose candidates depend on the budget: a higher budget may lead past the candidate that a lower one found.
NOT_MONOTONE = {"revolve", "rotor", "rotor_floating"}
# Slower or larger than the plain step however much memory there is: each stage is run again before its backward;
# without liveness analysis values outlive their use.
NOT_PLAIN = {"revolve", "kusumoto_exact parts", "kusumoto_approx parts"}

RELU = Node("relu", "relu", (), (0,), output_bytes=8, forward_seconds=1.0, backward_seconds=2.0)


def relu(n: int, *inputs: int) -> Node:
    return replace(RELU, name=f"relu{n}", inputs=inputs, saved=(n,))


def view(n: int, base: int) -> Node:
    return Node(f"view{n}", "view", (base,), storage_of=base, forward_seconds=0.1, backward_seconds=0.1)


CHAIN = tuple(relu(n, *([n - 1] if n else [])) for n in range(6))
EDGE_CASES = {
    "empty": Graph(()),
    "empty with parameters": Graph((), input_bytes=3, static_bytes=5),
    "one node": Graph((relu(0),)),
    "one node, an output": Graph((relu(0),), input_bytes=4, outputs=(0,)),
    "all views": Graph((relu(0), view(1, 0), view(2, 1), view(3, 0)), outputs=(3,)),
    "several sinks": Graph((relu(0), relu(1, 0), relu(2, 0), relu(3, 1), relu(4, 1, 2)), outputs=(3, 4)),
    "unconnected": Graph((relu(0), relu(1), relu(2, 0), relu(3, 1))),
    "no seconds": Graph(tuple(replace(n, forward_seconds=0.0, backward_seconds=0.0) for n in CHAIN)),
    "no bytes": Graph(tuple(replace(n, output_bytes=0) for n in CHAIN)),
    "no bytes, no seconds": Graph(
        tuple(replace(n, output_bytes=0, forward_seconds=0.0, backward_seconds=0.0) for n in CHAIN), input_bytes=1
    ),
    "nothing saved": Graph(tuple(replace(n, saved=()) for n in CHAIN), outputs=(5,)),
}


def answer(graph: Graph, budget_bytes: int, planner: str) -> Simulation:
    """The judged answer of a planner; `simulate` raises where the schedule breaks a rule."""
    schedule = VARIANTS[planner](graph, budget_bytes)
    assert isinstance(schedule, Schedule)
    found = simulate(graph, schedule)
    assert found.peak_bytes <= budget_bytes
    return found


def plain_step(graph: Graph) -> Simulation:
    return simulate(graph, lower_kept(graph, range(len(graph.nodes))))


def check_contract(graph: Graph, planner: str) -> None:
    with pytest.raises(InfeasibleBudgetError) as error:
        VARIANTS[planner](graph, -1)
    floor = int(error.value.minimum_bytes)
    assert floor == error.value.minimum_bytes
    if graph.nodes:
        assert error.value.node in {node.name for node in graph.nodes}
        assert repr(error.value.node) in str(error.value)
    assert error.value.budget_bytes == -1
    assert str(floor) in str(error.value)
    slowest = answer(graph, floor, planner)
    assert slowest.peak_bytes == floor
    with pytest.raises(InfeasibleBudgetError) as below:
        VARIANTS[planner](graph, floor - 1)
    assert below.value.minimum_bytes == floor

    plain = plain_step(graph)
    assert floor <= plain.peak_bytes or planner in NOT_PLAIN
    seconds = slowest.seconds
    for step in range(1, 4):
        budget = floor + (max(plain.peak_bytes, floor) - floor) * step // 3
        found = answer(graph, budget, planner)
        assert found.seconds >= plain.seconds - 1e-9
        if planner not in NOT_MONOTONE:
            assert found.seconds <= seconds + 1e-9
        seconds = found.seconds
    if planner not in NOT_PLAIN:
        assert seconds == pytest.approx(plain.seconds)


@pytest.mark.slow
@pytest.mark.parametrize("planner", VARIANTS)
@given(graph=graphs())
@settings(deadline=None, max_examples=15)
def test_it_fits_or_says_how_low_it_can_go(planner: str, graph: Graph) -> None:
    check_contract(graph, planner)


@pytest.mark.sampled
@pytest.mark.parametrize("planner", VARIANTS)
@pytest.mark.parametrize("name", EDGE_CASES)
def test_odd_graphs_are_planned_alike(planner: str, name: str) -> None:
    check_contract(EDGE_CASES[name], planner)


@pytest.mark.slow
@given(graph=graphs())
@settings(deadline=None, max_examples=15)
def test_auto_is_never_slower_and_goes_lowest(graph: Graph) -> None:
    floors: dict[str, float] = {}
    for name in PLANNERS:
        with pytest.raises(InfeasibleBudgetError) as error:
            plan(graph, -1, name)
        floors[name] = error.value.minimum_bytes
    assert floors["auto"] == min(floors.values())
    for budget in {int(floor) for floor in floors.values()}:
        ours = plan(graph, budget, "auto").simulation.seconds
        for name, floor in floors.items():
            if floor <= budget:
                assert ours <= plan(graph, budget, name).simulation.seconds + 1e-9, (name, budget)


@pytest.mark.parametrize("name", ["dtr", "feng"])
@settings(max_examples=60, deadline=None)
@given(graph=node_graphs(most=8))
def test_more_memory_is_never_slower_from_the_floor_on(name: str, graph: Any) -> None:
    planner = PLANNERS[name]
    with pytest.raises(InfeasibleBudgetError) as error:
        planner(graph, 0)
    floor = int(error.value.minimum_bytes)
    assert error.value.node in {node.name for node in graph.nodes}
    with pytest.raises(InfeasibleBudgetError):
        planner(graph, floor - 1)
    slower = math.inf
    for budget in range(floor, floor + 40, 5):
        simulation = simulate(graph, planner(graph, budget))
        assert simulation.peak_bytes <= budget
        assert simulation.seconds <= slower
        slower = simulation.seconds
