"""The compiled judge of whole schedules says what `simulate` says."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.node_graphs import node_graphs, priced, varied
from random_graphs import graphs, schedules

from lightning_remat import Graph, Schedule, simulate
from lightning_remat.lowering import apply_liveness
from lightning_remat.schedules.compiled_simulator import Judge


def check(graph: Graph, schedule: Schedule) -> None:
    found = simulate(graph, schedule)
    assert Judge(graph).cost(schedule) == (found.peak_bytes, found.seconds)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(0, 2**32))
def test_equals_the_simulator(data: st.DataObject, seed: int) -> None:
    rng = random.Random(seed)
    graph = priced(varied(data.draw(st.one_of(graphs(), node_graphs(most=9))), rng), rng)
    schedule = data.draw(schedules(graph))
    check(graph, schedule)
    check(graph, apply_liveness(graph, schedule))


def test_without_operations() -> None:
    graph = Graph((), input_bytes=3, static_bytes=4)
    assert Judge(graph).cost(Schedule(())) == (7, 0.0)
