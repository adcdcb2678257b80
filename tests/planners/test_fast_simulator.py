"""The compiled simulator of absence windows equals `simulate`, to the byte."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.node_graphs import node_graphs, relu_chain, varied

from lightning_remat import Graph, Schedule, simulate
from lightning_remat.lowering import lower_kept
from lightning_remat.planners._auto.intervals import bar, list_gaps, unbar
from lightning_remat.planners._auto.window_simulator import (
    NONE,
    NUM_WINDOWS,
    no_windows,
    pack,
    replay,
    work_for,
)
from lightning_remat.planners._auto.windows import codes_of, windows_of
from lightning_remat.schedules.arrays import decode
from lightning_remat.schedules.gradients import gradient_levels


def random_windows(graph: Graph, rng: random.Random) -> np.ndarray:
    problem = pack(graph)
    windows, steps = no_windows(problem), 2 * len(graph.nodes)
    for v in range(steps):
        n = v % len(graph.nodes)
        is_tape = v >= len(graph.nodes)
        is_free = bool(graph.nodes[n].tape_bytes) if is_tape else graph.roots[n] == n and not problem.is_pinned[n]
        if not is_free:
            continue
        places = sorted(rng.sample(range(n, steps), min(2 * rng.randrange(NUM_WINDOWS + 1), steps - n) // 2 * 2))
        for k in range(len(places) // 2):
            windows[v, k] = places[2 * k], places[2 * k + 1]
    return windows


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(node_graphs(most=9), st.integers(0, 2**32))
def test_equals_the_simulator(graph: Graph, seed: int) -> None:
    rng = random.Random(seed)
    graph = varied(graph, rng)
    problem, windows = pack(graph), random_windows(graph, rng)
    work = work_for(problem)
    peak, seconds, num_actions = replay(problem, windows, work)
    schedule = decode(graph, codes_of(problem, windows, work))
    simulation = simulate(graph, schedule)
    assert peak == simulation.peak_bytes
    assert seconds == pytest.approx(simulation.seconds)
    assert num_actions == sum(action.kind in "FB" for action in schedule)
    assert int(work.most.max()) == peak


@settings(max_examples=300, deadline=None)
@given(node_graphs(most=10, views=False), st.integers(0, 2**32))
def test_every_kept_set_is_a_choice_of_windows(graph: Graph, seed: int) -> None:
    rng = random.Random(seed)
    graph = replace(graph, outputs=())
    schedule = lower_kept(graph, {n for n in range(len(graph.nodes)) if rng.random() < 0.5})
    problem = pack(graph)
    simulation = simulate(graph, schedule)
    peak, seconds, _ = replay(problem, windows_of(graph, problem, schedule), work_for(problem))
    assert peak <= simulation.peak_bytes
    assert seconds <= simulation.seconds + 1e-9


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(node_graphs(most=10), st.integers(0, 2**32))
def test_gradient_levels_are_what_the_simulator_adds(graph: Graph, seed: int) -> None:
    """On a step that drops nothing before the last backward, the rest of the timeline is gradients."""
    graph = varied(graph, random.Random(seed))
    released = {"backward_release_bytes": 0, "backward_shared_release_bytes": 0}
    graph = replace(graph, nodes=tuple(replace(node, **released) for node in graph.nodes))
    count = len(graph.nodes)
    text = [f"F{n}" for n in range(count)] + [f"B{n}" for n in reversed(range(count))]
    text += [f"D{n}" for n in range(count)] + [f"T{n}" for n in range(count) if graph.nodes[n].tape_bytes]
    memory = simulate(graph, Schedule.parse(" ".join(text))).memory_bytes
    held = graph.input_bytes + sum(node.output_bytes + node.tape_bytes for node in graph.nodes)
    _, highest = gradient_levels(graph)
    assert [memory[2 * count - 1 - n] - held for n in range(count)] == highest


def test_a_window_over_the_turning_point_is_a_recomputation() -> None:
    graph = relu_chain(4)
    problem = pack(graph)
    windows = no_windows(problem)
    assert bar(windows, 1, 2, 6)  # absent from the end of F2 until the backward of node 1
    assert (
        str(decode(graph, codes_of(problem, windows, work_for(problem)))) == "F0 F1 F2 D1 F3 B3 D3 B2 D2 F1 B1 D1 B0 D0"
    )


def test_gaps_are_the_moves_between_held_and_absent() -> None:
    graph = relu_chain(3)
    problem = pack(graph)
    work = work_for(problem)
    windows = no_windows(problem)
    _, _, num_actions = replay(problem, windows, work)
    rows, sizes, seconds = list_gaps(problem, work, num_actions)
    assert sorted(map(tuple, rows.tolist())) == [(0, 0, 1, 1), (0, 1, 5, 1), (1, 1, 2, 1), (1, 2, 4, 1), (2, 2, 3, 1)]
    assert set(sizes.tolist()) == {100}
    assert set(seconds.tolist()) == {1.0}
    bar(windows, 0, 1, 5)
    rows, _, _ = list_gaps(problem, work, replay(problem, windows, work)[2])
    assert (0, 1, 5, 0) in set(map(tuple, rows.tolist()))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(1, 12)), max_size=12))
def test_windows_are_sets_of_steps(changes: list[tuple[bool, int, int]]) -> None:
    windows = np.full((1, NUM_WINDOWS, 2), NONE, np.int32)
    absent: set[int] = set()
    for is_bar, start, length in changes:
        before = windows.copy()
        if (bar if is_bar else unbar)(windows, 0, start, start + length):
            span = set(range(start, start + length))
            absent = absent | span if is_bar else absent - span
        else:
            windows[:] = before
        assert {s for a, b in windows[0].tolist() if a != NONE for s in range(a, b)} == absent
        starts = windows[0, :, 0].tolist()
        assert starts == sorted(starts)
