"""`auto`: never slower than the others, monotone, deterministic, and exact about its floor."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from unittest.mock import Mock

import pytest
from auto_cases import SMALL, budgets, convolutions, minimum
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles.node_graphs import node_graphs, relu_chain

from lightning_remat import PLANNERS, Graph, InfeasibleBudgetError, Node, Schedule, plan, simulate
from lightning_remat.lowering import lower_kept
from lightning_remat.planners._auto import constants
from lightning_remat.planners._auto import front_search as auto_front
from lightning_remat.planners._auto import portfolio as rivals
from lightning_remat.planners._auto.front_search import _front, front_of
from lightning_remat.planners._auto.local_search import State
from lightning_remat.planners._progress import SearchProgress
from lightning_remat.planners.auto import plan_auto
from lightning_remat.planners.chen_recursive import plan_chen_recursive
from lightning_remat.planners.rotor import plan_rotor
from lightning_remat.schedules.floor import find_floor
from lightning_remat.schedules.schedule import Action


def made_on_the_way() -> Graph:
    """The lowest peak is in the backward of op2, which has op1 run again but not op0, made for that run alone."""
    nodes = (
        Node("op0", "op", (), (0,), 1, 0, 1.0, 2.0, forward_workspace_bytes=4, parameter_bytes=3),
        Node("op1", "op", (0,), (1,), 10, 0, 1.0, 2.0),
        Node("op2", "op", (0, 1), (), 6, 0, 1.0, 2.0, parameter_bytes=2),
    )
    return Graph(nodes, input_bytes=1)


def lowest_peak(graph: Graph) -> int:
    """By exhaustive search over all absences of every value at the end of every step, one by one."""
    from lightning_remat.planners._auto.intervals import bar
    from lightning_remat.planners._auto.window_simulator import no_windows, pack, replay, work_for

    problem = pack(graph)
    work, count = work_for(problem), len(graph.nodes)
    steps = [(v, s) for v in range(count) for s in range(v, 2 * count - 1)]
    best = 1 << 60
    for absent in itertools.product((False, True), repeat=len(steps)):
        windows = no_windows(problem)
        if all(bar(windows, v, s, s + 1) for (v, s), gone in zip(steps, absent, strict=True) if gone):
            best = min(best, replay(problem, windows, work)[0])
    return best


def priced(graph: Graph, price: float) -> Graph:
    return replace(graph, nodes=tuple(replace(node, stretch_price=price) for node in graph.nodes))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(node_graphs(most=9), st.sampled_from([0.0, 4.0]))
def test_no_budget_is_slower_than_any_other_planner(graph: Graph, stretch_price: float) -> None:
    graph = priced(graph, stretch_price)
    for budget in budgets(graph, 5):
        ours = simulate(graph, plan_auto(graph, budget, effort=SMALL))
        assert ours.peak_bytes <= budget
        for name in ("keep_all", "periodic", "chen_cheap"):
            with suppress(InfeasibleBudgetError):
                assert ours.seconds <= simulate(graph, PLANNERS[name](graph, budget)).seconds + 1e-9, name


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(node_graphs(most=9))
def test_the_floor_is_exact(graph: Graph) -> None:
    lowest = minimum(graph)
    assert simulate(graph, plan_auto(graph, lowest, effort=SMALL)).peak_bytes == lowest
    assert lowest >= find_floor(graph).bytes
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_auto(graph, lowest - 1, effort=SMALL)
    assert caught.value.minimum_bytes == lowest
    assert caught.value.node in {node.name for node in graph.nodes}


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(node_graphs(least=3, most=3, views=False))
@example(made_on_the_way())
def test_the_floor_is_that_of_exhaustive_search(graph: Graph) -> None:
    graph = replace(graph, nodes=tuple(replace(node, tape_bytes=0) for node in graph.nodes), outputs=())
    assert minimum(graph) == lowest_peak(graph)


@pytest.mark.slow
@pytest.mark.parametrize("stretch_price", [0.0, 4.0])
def test_more_budget_is_never_slower(stretch_price: float) -> None:
    graph = priced(convolutions(), stretch_price)
    seconds = [simulate(graph, plan_auto(graph, b, effort=SMALL)).seconds for b in range(minimum(graph), 4000, 7)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == simulate(graph, lower_kept(graph, range(len(graph.nodes)))).seconds


def test_the_search_is_deterministic() -> None:
    graph = convolutions(6)
    first = front_of(graph, SMALL)
    _front.cache_clear()
    second = front_of(graph, SMALL)
    assert (first.peaks, first.seconds) == (second.peaks, second.seconds)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(node_graphs(most=9))
def test_a_node_is_run_again_only_for_its_output_or_tape(graph: Graph) -> None:
    front = front_of(graph, SMALL)
    for index in range(len(front.peaks)):
        actions = front.schedule(index).actions
        for position, (kind, n) in enumerate(actions):
            if kind == "F" and ("F", n) in actions[:position]:
                assert is_used(graph, n, actions[position + 1 :]), (str(front.schedule(index)), position)


def is_used(graph: Graph, n: int, later: Sequence[Action]) -> bool:
    """Whether the output of n, or a view of it, or its tape is read before it is discarded."""
    has_output, has_tape = True, graph.nodes[n].tape_bytes > 0
    for kind, m in later:
        if (has_output and kind == "F" and n in graph.reads[m]) or (
            kind == "B" and ((has_output and n in graph.nodes[m].saved) or (has_tape and m == n))
        ):
            return True
        has_output = has_output and (kind, m) not in (("D", n), ("F", n))
        has_tape = has_tape and (kind, m) not in (("T", n), ("F", n))
    return False


@pytest.mark.slow
def test_another_size_starts_from_what_was_found_at_the_first() -> None:
    graph = convolutions()
    small = replace(
        graph,
        nodes=tuple(replace(n, output_bytes=n.output_bytes // 2, tape_bytes=n.tape_bytes // 2) for n in graph.nodes),
    )
    _front.cache_clear()
    first = front_of(graph, SMALL)
    assert front_of(graph, SMALL) is first
    second = front_of(small, SMALL, graph)
    for index in range(len(first.peaks)):
        found = simulate(small, first.schedule(index))
        at = second.within(found.peak_bytes)
        assert at is not None
        assert second.seconds[at] <= found.seconds + 1e-9


def test_what_is_its_own_start_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, other = relu_chain(8), relu_chain(8, output_bytes=60)
    searched: list[Graph] = []
    monkeypatch.setattr(auto_front, "_search", lambda graph, *_: searched.append(graph) or Mock())
    _front.cache_clear()
    try:
        own = front_of(graph, SMALL, graph)
        assert front_of(other, SMALL, graph) is not own
        assert front_of(graph, SMALL) is front_of(graph, SMALL, relu_chain(7)) is own
    finally:
        _front.cache_clear()
    assert searched == [graph, other]


@pytest.mark.slow
def test_a_front_does_not_depend_on_what_was_planned_before() -> None:
    graph = relu_chain(12)
    other = relu_chain(12, output_bytes=60)
    _front.cache_clear()
    alone = front_of(graph, SMALL)
    _front.cache_clear()
    front_of(other, SMALL)
    after = front_of(graph, SMALL)
    assert (after.peaks, after.seconds) == (alone.peaks, alone.seconds)
    assert [after.schedule(k) for k in range(len(after.peaks))] == [alone.schedule(k) for k in range(len(alone.peaks))]


@pytest.mark.slow
def test_threads_that_plan_at_once_find_what_one_finds_alone() -> None:
    graphs = [relu_chain(length) for length in (8, 9, 10, 11)]
    _front.cache_clear()
    alone = [front_of(graph, SMALL).peaks for graph in graphs]
    _front.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(lambda graph: front_of(graph, SMALL).peaks, graphs * 2))
    assert at_once == alone * 2


def test_cheap_values_go_before_costly_ones() -> None:
    graph = convolutions()
    schedule = plan_auto(graph, budgets(graph, 20)[14], effort=SMALL)
    runs = [action.node for action in schedule if action.kind == "F"]
    again = {graph.nodes[n].kind for n in runs if runs.count(n) > 1}
    assert again
    assert "conv2d" not in again


@pytest.mark.slow
def test_a_long_chain_needs_about_logarithmic_memory() -> None:
    """Repeated recomputation: single recomputations alone cannot go below 2 sqrt(n) values."""
    graph = relu_chain(100)
    schedule = plan_auto(graph, 1000, effort=10 * SMALL)  # ten values at once
    assert simulate(graph, schedule).recompute_seconds < 300
    front = front_of(graph, 10 * SMALL)
    assert front.peaks[0] <= 4 * 100


def test_a_long_skip_is_dropped_within_the_forward() -> None:
    """The skip of a U: between encoder and decoder nothing needs it, and there the peak lies."""
    cost = {"forward_seconds": 1.0, "backward_seconds": 2.0}
    nodes = [Node("skip", "conv2d", (), (), 100, **cost)]
    for k in range(6):
        size = (60, 200, 400, 200, 60, 20)[k]
        workspace = 2000 if k == 2 else 0
        nodes.append(Node(f"op{k}", "relu", (k,), (k + 1,), size, forward_workspace_bytes=workspace, **cost))
    nodes.append(Node("join", "add", (0, 6), (), 100, **cost))
    graph = Graph(tuple(nodes))
    schedule = plan_auto(graph, minimum(graph), effort=SMALL)
    first_backward = next(k for k, action in enumerate(schedule) if action.kind == "B")
    assert sum(action == ("F", 0) for action in schedule.actions[:first_backward]) == 2


def test_an_empty_graph_has_an_empty_schedule() -> None:
    assert plan_auto(Graph((), input_bytes=3), 3) == Schedule(())


def test_is_the_default_planner() -> None:
    graph = convolutions(4)
    assert plan(graph, 10_000, effort=SMALL).planner == "auto"


@pytest.mark.slow
@pytest.mark.parametrize("effort", [SMALL, 10 * SMALL])
def test_low_budgets_get_their_share_of_the_search(effort: float, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = convolutions(60)
    builder = auto_front.FrontBuilder(graph, SearchProgress(""), effort)
    builder.meet_rivals()
    builder.find_lowest()
    walked: list[int] = []
    step_down = builder._step_down

    def watched(state: State, limit: int, *arguments: float, **options: bool) -> State:
        walked.append(limit)
        return step_down(state, limit, *arguments, **options)

    monkeypatch.setattr(builder, "_step_down", watched)
    builder.sweep()
    levels = builder.levels()
    assert walked[0] == levels[2]
    assert min(walked) <= levels[-10]


@pytest.mark.parametrize(("planner", "most_stages"), [(plan_rotor, 350), (plan_chen_recursive, 10)])
def test_in_deep_graphs_it_goes_as_low_as_planners_for_long_chains(
    planner: Callable[[Graph, int], Schedule], most_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = convolutions()
    with pytest.raises(InfeasibleBudgetError) as error:
        planner(graph, 0)
    monkeypatch.setattr(rivals, "MOST_STAGES", most_stages)
    lowest = min(candidate.peak_bytes for candidate in rivals.deep_candidates(graph))
    assert lowest == error.value.minimum_bytes
    monkeypatch.setattr(constants, "DEEP_NODES", 10)
    monkeypatch.setattr(auto_front.FrontBuilder, "meet_rivals", lambda builder: builder._meet([]))
    _front.cache_clear()
    with pytest.raises(InfeasibleBudgetError) as error:
        plan_auto(graph, 0, effort=SMALL)
    assert error.value.minimum_bytes <= lowest
    _front.cache_clear()


@pytest.mark.slow
def test_in_deep_graphs_it_is_never_slower_than_rotor(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = convolutions()
    monkeypatch.setattr(constants, "DEEP_NODES", 10)
    monkeypatch.setattr(constants, "DEEPER_NODES", 12)
    _front.cache_clear()
    with pytest.raises(InfeasibleBudgetError) as error:
        plan_rotor(graph, 0)
    lowest, plain = int(error.value.minimum_bytes), plan(graph, 1 << 40, "keep_all").peak_bytes
    for k in range(20):
        budget = lowest + (plain - lowest) * k // 19
        ours, theirs = (simulate(graph, planner(graph, budget)) for planner in (small_auto, plan_rotor))
        assert ours.peak_bytes <= budget
        assert ours.seconds <= theirs.seconds
    _front.cache_clear()


def small_auto(graph: Graph, budget_bytes: int) -> Schedule:
    return plan_auto(graph, budget_bytes, effort=SMALL)
