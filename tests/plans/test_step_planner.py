"""The memory of a whole step, and plans that keep it within a budget; checked on graphs small enough to add up."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from lightning_remat import Graph, InfeasibleBudgetError, Node, Schedule, simulate
from lightning_remat.batch_search.scaling import Line, ScalableGraph, scaled_surroundings
from lightning_remat.lowering import lower_kept
from lightning_remat.plans.plan import StepPlan
from lightning_remat.plans.planner import plan
from lightning_remat.plans.step_memory import (
    HandedOn,
    RegionCost,
    StepPeaks,
    Surroundings,
    forward_length,
    region_peaks,
    step_timeline,
)
from lightning_remat.plans.step_planner import plan_step


def chain(count: int = 6, size: int = 100, parameter_bytes: int = 10, *, scale: float = 1.0) -> Graph:
    """ReLU-like layers that save their outputs, with a parameter each."""
    nodes = tuple(
        Node(
            f"layer{i}",
            kind="relu",
            inputs=(i - 1,) if i else (),
            saved=(i,),
            output_bytes=int(size * scale),
            forward_seconds=1.0 * scale,
            backward_seconds=2.0 * scale,
            parameter_bytes=parameter_bytes,
        )
        for i in range(count)
    )
    return Graph(nodes, input_bytes=int(40 * scale), static_bytes=count * parameter_bytes, outputs=(count - 1,))


def plain(key: str, graph: Graph) -> RegionCost:
    return RegionCost(key, graph, lower_kept(graph, range(len(graph.nodes))))


AROUND = Surroundings(resident_bytes=1000, optimizer_step_bytes=0)


def knows_nothing(graph: Graph, budget_bytes: int) -> Schedule:
    raise InfeasibleBudgetError("too little", minimum_bytes=math.inf, budget_bytes=budget_bytes)


@pytest.mark.parametrize("keys", [("net",), ("net", "net")])
def test_a_planner_that_knows_no_budget_that_suffices_is_refused(keys: tuple[str, ...]) -> None:
    with pytest.raises(InfeasibleBudgetError):
        plan_step(keys, {"net": chain()}, 1500, knows_nothing, AROUND)


def test_gradients_of_the_step_before_are_alive_in_the_forward_only() -> None:
    graph = chain()
    timeline = step_timeline([plain("net", graph)], AROUND)
    simulation = simulate(graph, plain("net", graph).schedule)
    n = timeline.num_forward
    gradients = 6 * 10
    assert n == 6
    assert timeline.memory_bytes[:n] == tuple(1000 + gradients + m for m in simulation.memory_bytes[:n])
    assert timeline.memory_bytes[n:] == tuple(1000 + m for m in simulation.memory_bytes[n:])


def test_accumulation_keeps_gradients_throughout() -> None:
    graph = chain()
    around = Surroundings(1000, 0, is_accumulating=True)
    kept = simulate(graph, plain("net", graph).schedule, gradients="kept")
    assert step_timeline([plain("net", graph)], around).memory_bytes == tuple(1000 + m for m in kept.memory_bytes)


def test_regions_hold_what_they_kept_while_others_run() -> None:
    graph = chain()
    one = step_timeline([plain("a", graph)], AROUND).peak_bytes
    two = step_timeline([plain("a", graph), plain("b", graph)], AROUND)
    # The second forward runs on top of the first region's six outputs, parameters, gradients and input.
    assert two.memory_bytes[two.num_forward - 1] == 1000 + 2 * (40 + 60 + 60) + 12 * 100
    assert two.peak_bytes > one + 600
    twice = step_timeline([plain("a", graph), plain("a", graph)], AROUND)
    assert twice.memory_bytes[twice.num_forward - 1] == 1000 + 2 * 40 + 60 + 60 + 12 * 100


def test_what_a_backward_has_let_go_of_is_not_held_beside_the_next_forward() -> None:
    graph = chain()
    regions, fixed = [plain("a", graph), plain("b", graph)], 1000 + 2 * (40 + 60)
    apart = step_timeline(regions, replace(AROUND, order=(0, ~0, 1, ~1)))
    (alone,) = {simulate(graph, region.schedule).peak_bytes - 40 - 60 for region in regions}
    # While one runs, the gradients of the other are there: those of the step before, then the new ones.
    assert apart.peak_bytes == fixed + 60 + alone < step_timeline(regions, AROUND).peak_bytes
    half = len(apart.memory_bytes) // 2
    assert apart.memory_bytes[half : half + 6] == apart.memory_bytes[:6]  # of the first, nothing is left
    assert apart.num_forward == 6
    # The backward of the first waits for what is called and differentiated in between.
    waiting = step_timeline(regions, replace(AROUND, order=(0, 1, ~1, ~0)))
    assert waiting == step_timeline(regions, AROUND)


def test_gradients_that_have_come_are_told_apart() -> None:
    regions = [plain("a", chain(2)), plain("b", chain(2))]
    apart = (0, ~0, 1, ~1)

    def told(**around: Any) -> list[int]:
        """Without what is the same in the next action."""
        return [size for size, _ in groupby(step_timeline(regions, replace(AROUND, **around)).gradient_bytes)]

    assert told() == [40, 10, 20, 30, 40]
    assert told(order=apart) == [40, 30, 40, 30, 40]
    assert told(order=apart, is_alone=True) == [0, 10, 20, 30, 40]
    assert told(order=apart, is_accumulating=True) == [40]


@pytest.mark.parametrize("seed", range(30))
def test_peaks_of_whole_calls_are_those_of_the_timeline(seed: int) -> None:
    rng = random.Random(seed)
    keys = [rng.choice("abc") for _ in range(rng.randrange(1, 7))]
    graphs = {key: chain(rng.randrange(1, 5), rng.randrange(50, 200), rng.randrange(30)) for key in keys}
    turns: list[int] = []
    for call in range(len(keys)):
        turns.append(call)
        turns += [~k for k in range(call, -1, -1) if ~k not in turns and rng.random() < 0.3]
    turns += [~k for k in reversed(range(len(keys))) if ~k not in turns]
    sizes = {key: rng.randrange(99) for key in keys}
    handed_on = HandedOn(
        during_bytes=tuple(rng.randrange(-50, 200) for _ in turns) if rng.random() < 0.5 else (),
        passing_bytes=tuple(sizes[key] for key in keys),
    )
    around = replace(AROUND, order=tuple(turns), is_accumulating=rng.random() < 0.3, is_alone=rng.random() < 0.3)
    around = replace(around, handed_on=handed_on)
    over = tuple(k for k in range(len(keys)) if rng.random() < 0.2)
    around = replace(around, over=over)
    regions = [
        replace(plain(key, graphs[key]), passing_bytes=sizes[key], is_over=k in over) for k, key in enumerate(keys)
    ]
    peaks = [region_peaks(region, around.keeps_gradients) for region in regions]
    figures = ([p.forward_bytes for p in peaks], [p.backward_bytes for p in peaks], [p.held_bytes for p in peaks])
    found = StepPeaks([(r.key, r.graph) for r in regions], around).of(*np.array(figures))
    timeline = step_timeline(regions, around)
    assert found.max() == timeline.peak_bytes
    assert found.shape == (2 * len(keys),)
    plans = {key: plan(graph, 10**9, "keep_all") for key, graph in graphs.items()}
    step = StepPlan(10**9, tuple(keys), plans, around)
    assert StepPlan.from_json(step.to_json()) == step
    assert len(step.as_plan("keep_all").schedule) == len(timeline.memory_bytes)


def test_what_lies_between_calls_counts_while_it_is_alive() -> None:
    graph = chain(2)
    regions = [plain("a", graph), plain("b", graph)]
    alone = step_timeline(regions, AROUND)
    between = step_timeline(regions, replace(AROUND, handed_on=HandedOn((0, 30, -20, 0))))
    one = len(alone.memory_bytes) // 4
    added = [b - a for a, b in zip(alone.memory_bytes, between.memory_bytes, strict=True)]
    assert added == [0] * 2 + [30] * 2 + [-20] * (2 * one - 2) + [0] * (2 * one - 2)
    assert list(between.handed_on_bytes) == added
    assert between.gradient_bytes == alone.gradient_bytes


@pytest.mark.parametrize(("schedule", "recomputes"), [("F0 F1 B1 D1 B0 D0", False), ("F0 F1 D0 B1 F0 B0 D0 D1", True)])
def test_who_recomputes_holds_its_inputs_until_its_backward(schedule: str, recomputes: bool) -> None:
    graph = chain(2)
    region = RegionCost("a", graph, Schedule.parse(schedule))
    reads = replace(region, passing_bytes=70)
    own, grown = (step_timeline([r, plain("b", graph)], AROUND).memory_bytes for r in (region, reads))
    added = [b - a for a, b in zip(own, grown, strict=True)]
    first = forward_length(region.schedule, 2)
    assert added == [70] * first + [70 if recomputes else 0] * (len(added) - first)
    assert region_peaks(region, False).reading(70, recomputes=recomputes) == region_peaks(reads, False)


def test_what_no_backward_comes_to_is_held_until_its_turn_alone() -> None:
    graph = chain(2)
    regions = [replace(plain("a", graph), is_over=True), plain("b", graph)]
    timeline = step_timeline(regions, replace(AROUND, order=(0, ~0, 1, ~1), over=(0,), is_alone=True))
    fixed, half = 1000 + 2 * (40 + 20), len(timeline.memory_bytes) // 2
    one = step_timeline([plain("b", graph)], replace(AROUND, is_alone=True))
    assert timeline.memory_bytes[:2] == (fixed + 100, fixed + 200)
    assert set(timeline.memory_bytes[3:half]) == {fixed}  # it makes no gradients
    assert timeline.memory_bytes[half:] == tuple(40 + 20 + m for m in one.memory_bytes)
    assert timeline.num_forward == half + 2
    assert timeline.seconds[2:half] == (0.0,) * (half - 2)


def test_a_region_is_not_recomputed_where_its_inputs_take_what_that_saves() -> None:
    graphs = {"a": chain(4), "b": chain(4)}
    around = replace(AROUND, handed_on=HandedOn(passing_bytes=(0, 10**4)))
    plans = {key: plan(graph, 10**9, "keep_all") for key, graph in graphs.items()}
    tight = StepPlan(10**9, ("a", "b"), plans, around).predicted_peak_bytes - 150
    made = plan_step(["a", "b"], graphs, tight, "periodic", around)
    assert made.predicted_peak_bytes <= tight
    assert made.plans["a"].num_recomputed
    assert not made.plans["b"].num_recomputed
    with pytest.raises(InfeasibleBudgetError):
        plan_step(["a", "b"], graphs, tight, "periodic", replace(around, handed_on=HandedOn((), (10**4, 10**4))))


def test_what_lies_between_calls_grows_with_the_batch() -> None:
    small, large = HandedOn((10, -10), (4, 0)), HandedOn((20, -20), (8, 0))
    small_around, large_around = replace(AROUND, handed_on=small), replace(AROUND, handed_on=large)
    found = scaled_surroundings(Line(1, 2), small_around, large_around, 3)
    assert found.handed_on == HandedOn((30, -30), (12, 0))


def test_optimizer_step_can_be_the_peak() -> None:
    around = Surroundings(0, optimizer_step_bytes=10**6)
    assert step_timeline([plain("net", chain())], around).peak_bytes == 10**6


@pytest.mark.parametrize("keys", [("a",), ("a", "b"), ("a", "a")])
@pytest.mark.parametrize("part", [1.0, 0.9, 0.8, 0.75])
def test_plan_stays_within_the_budget_of_the_whole_step(keys: tuple[str, ...], part: float) -> None:
    graphs = {key: chain(12) for key in keys}
    whole = step_timeline([plain(k, graphs[k]) for k in keys], AROUND).peak_bytes - 1000
    step = plan_step(keys, graphs, 1000 + int(part * whole), "periodic", AROUND)
    assert step.predicted_peak_bytes <= 1000 + int(part * whole)
    assert (step.num_recomputed == 0) == (part == 1.0)
    assert step.plain_peak_bytes == 1000 + whole


@pytest.mark.slow
@pytest.mark.parametrize("let_go", [(), (5, 11, 17, 18, 23)])
def test_every_budget_above_the_lowest_peak_can_be_met(let_go: tuple[int, ...]) -> None:
    rng = random.Random(0)
    nodes = [
        replace(node, output_bytes=rng.randrange(90, 110), parameter_bytes=rng.randrange(5, 60))
        for node in chain(30).nodes
    ]
    graphs = {"net": replace(chain(30), nodes=tuple(nodes), let_go=let_go)}
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_step(("net",), graphs, 1, "chen_cheap", AROUND)
    for budget in range(int(caught.value.minimum_bytes), plain_step_bytes(graphs), 3):
        assert plan_step(("net",), graphs, budget, "chen_cheap", AROUND).predicted_peak_bytes <= budget


def test_what_is_let_go_late_in_the_forward_needs_no_more_than_if_it_were_held() -> None:
    graph = replace(chain(30), let_go=(6, 13, 20))
    least: list[int] = []
    for one in (graph, graph.holding_all):
        with pytest.raises(InfeasibleBudgetError) as caught:
            plan_step(["net"], {"net": one}, 1, "chen_cheap", AROUND)
        least.append(caught.value.sufficient_bytes)
    assert least[0] <= least[1]
    # They are there at the end of the forward, whatever the planner has discarded.
    step = plan_step(["net"], {"net": graph}, least[0], "chen_cheap", AROUND)
    assert step.timeline.memory_bytes[step.timeline.num_forward - 1] >= 1000 + graph.static_bytes + 3 * 100


def plain_step_bytes(graphs: dict[str, Graph]) -> int:
    return step_timeline([plain(key, graph) for key, graph in graphs.items()], AROUND).peak_bytes


def test_infeasible_names_the_least_budget_and_it_suffices() -> None:
    graphs = {"net": chain(12)}
    with pytest.raises(InfeasibleBudgetError, match="node 'layer") as caught:
        plan_step(["net"], graphs, 1100, "periodic", AROUND)
    least = int(caught.value.minimum_bytes)
    assert plan_step(["net"], graphs, least, "periodic", AROUND).predicted_peak_bytes <= least


@pytest.mark.parametrize("seed", [5, 9, 21])
def test_of_several_regions_no_budget_below_the_least_one_is_met(seed: int) -> None:
    rng = random.Random(seed)

    def varied(count: int, least: int, most: int) -> Graph:
        nodes = (
            replace(
                node,
                output_bytes=rng.randrange(least, most),
                parameter_bytes=rng.randrange(1, 20),
                tape_bytes=rng.randrange(60),
                backward_workspace_bytes=rng.randrange(150),
            )
            for node in chain(count).nodes
        )
        return replace(chain(count), nodes=tuple(nodes))

    graphs = {"a": varied(14, 20, 200), "b": varied(5, 100, 400), "c": varied(8, 20, 200)}
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_step(["a", "b", "c"], graphs, 1, "chen_cheap", AROUND)
    least = int(caught.value.minimum_bytes)
    assert plan_step(["a", "b", "c"], graphs, least, "chen_cheap", AROUND).predicted_peak_bytes <= least
    for part in (0.97, 0.94, 0.9, 0.85, 0.8):
        with pytest.raises(InfeasibleBudgetError):
            plan_step(["a", "b", "c"], graphs, 1000 + int(part * (least - 1000)), "chen_cheap", AROUND)


def test_optimizer_step_above_the_budget_is_named() -> None:
    with pytest.raises(InfeasibleBudgetError, match="the optimizer's step") as caught:
        plan_step(["net"], {"net": chain()}, 5000, "periodic", Surroundings(0, 9000))
    assert caught.value.minimum_bytes == 9000


def test_bytes_at_another_size_are_those_of_its_graph() -> None:
    scalable = ScalableGraph(Line(2, 4), chain(scale=2), chain(scale=4))
    assert scalable.at(11) == chain(scale=11)


def test_profiles_of_different_modules_are_refused() -> None:
    with pytest.raises(ValueError, match="6 operations at batch size 2 and 7 others at 4"):
        ScalableGraph(Line(2, 4), chain(6), chain(7))


@pytest.mark.slow
def test_what_a_choice_of_few_schedules_leaves_is_used() -> None:
    """One large region beside a small one gets, within a layer's output, the seconds that it would get alone."""
    graphs = {"large": chain(60), "small": chain(2)}
    whole = step_timeline([plain(k, graph) for k, graph in graphs.items()], AROUND).peak_bytes
    for missing in range(100, 2000, 230):
        step = plan_step(list(graphs), graphs, whole - missing, "auto", AROUND)
        assert step.predicted_peak_bytes <= whole - missing
        assert step.num_recomputed <= missing // 100 + 2
