from __future__ import annotations

from collections.abc import Callable

import pytest
from chain_examples import lower_sequence
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.block_graphs import block_graphs, persistent_sequences
from oracles.node_graphs import node_graphs, relu_chain

from lightning_remat import Graph, InfeasibleBudgetError, Node, Schedule, simulate
from lightning_remat.chain import ChainSequence
from lightning_remat.lowering import lower_kept
from lightning_remat.planners._chain.search import SubFamily, makespans_by_memory, stage_problem
from lightning_remat.planners._chain.solver import sequence_at
from lightning_remat.planners._chain.stages import cut_stages, stage_figures
from lightning_remat.planners.griewank import plan_revolve
from lightning_remat.planners.rotor import plan_rotor, plan_rotor_floating

PLANS = [plan_rotor, plan_rotor_floating, plan_revolve]
Plan = Callable[..., Schedule]


def product_chain(length: int) -> Graph:
    """Equal operations in a row, each of which saves its input and its output."""
    cost = {"output_bytes": 100, "forward_seconds": 1.0, "backward_seconds": 2.0}
    chain = (
        Node(f"op{i}", inputs=(i - 1,) if i else (), saved=(i - 1, i) if i else (i,), **cost) for i in range(length)
    )
    return Graph(tuple(chain))


def plain_peak(graph: Graph) -> int:
    return simulate(graph, lower_kept(graph, range(len(graph.nodes)))).peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@given(graph=st.one_of(block_graphs(), node_graphs()), fraction=st.floats(0.4, 1.1))
@settings(deadline=None, max_examples=40)
def test_the_answer_fits_or_the_error_names_the_floor(plan: Plan, graph: Graph, fraction: float):
    budget = int(fraction * plain_peak(graph))
    try:
        schedule = plan(graph, budget)
    except InfeasibleBudgetError as error:
        minimum = error.minimum_bytes
        assert minimum > budget
        assert error.node in {node.name for node in graph.nodes}  # noqa: PT017
        assert simulate(graph, plan(graph, int(minimum))).peak_bytes == minimum
        with pytest.raises(InfeasibleBudgetError) as below:
            plan(graph, int(minimum) - 1)
        assert below.value.minimum_bytes == minimum
    else:
        assert simulate(graph, schedule).peak_bytes <= budget


@pytest.mark.sampled
@pytest.mark.parametrize(
    "family", [SubFamily(tapes, floating) for tapes in (True, False) for floating in (True, False)]
)
@given(graph=block_graphs())
@settings(deadline=None, max_examples=50)
def test_the_dynamic_program_bounds_what_its_sequences_take(family: SubFamily, graph: Graph):
    stages = cut_stages(graph)
    figures = tuple(stage_figures(graph, stage) for stage in stages)
    problem = stage_problem(graph, stages, figures, family)
    table, memories = makespans_by_memory(problem, 500)
    for memory in memories:
        simulation = simulate(graph, lower_sequence(graph, stages, sequence_at(problem, table, memory)))
        assert simulation.peak_bytes <= memory + graph.input_bytes + graph.static_bytes


@pytest.mark.sampled
@pytest.mark.parametrize("budget", range(450, 1200, 50))
def test_rotor_is_optimal_on_a_plain_chain(budget: int):
    graph = product_chain(6)
    stages = cut_stages(graph)
    texts = persistent_sequences(1, len(stages))
    judged = [simulate(graph, lower_sequence(graph, stages, ChainSequence.parse(text))) for text in texts]
    best = min((s.seconds for s in judged if s.peak_bytes <= budget), default=None)
    if best is None:
        with pytest.raises(InfeasibleBudgetError) as error:
            plan_rotor(graph, budget)
        assert error.value.minimum_bytes == min(s.peak_bytes for s in judged)
    else:
        assert simulate(graph, plan_rotor(graph, budget)).seconds == best


@pytest.mark.slow
@given(graph=block_graphs(), fraction=st.floats(0.4, 1.0))
@settings(deadline=None, max_examples=40)
def test_the_wider_family_is_never_slower_and_never_higher(graph: Graph, fraction: float):
    budget = int(fraction * plain_peak(graph))
    seconds: list[float] = []
    for plan in (plan_rotor_floating, plan_rotor):
        try:
            seconds.append(simulate(graph, plan(graph, budget)).seconds)
        except InfeasibleBudgetError:
            seconds.append(float("inf"))
    assert seconds[0] <= seconds[1]


@pytest.mark.parametrize("plan", [plan_rotor, plan_rotor_floating])
@given(graph=node_graphs())
@settings(deadline=None, max_examples=30)
def test_an_ample_budget_is_plain_autograd(plan: Plan, graph: Graph):
    assert simulate(graph, plan(graph, plain_peak(graph))).recompute_seconds == 0


def test_slots_and_exact_memory_agree_on_long_chains():
    # 90 stages: more states than are planned in exact memory.
    graph = relu_chain(90)
    for budget in (1600, 2500, 6000):
        simulation = simulate(graph, plan_rotor(graph, budget))
        assert simulation.peak_bytes <= budget
        assert simulate(graph, plan_rotor(graph, budget, slots=50)).seconds >= simulation.seconds
    with pytest.raises(ValueError, match="slots is 0"):
        plan_rotor(graph, 1600, slots=0)
