from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.node_graphs import node_graphs

from lightning_remat import Graph, Node, simulate
from lightning_remat.lowering import lower_kept
from lightning_remat.planners._auto.local_search import Search, State
from lightning_remat.planners._auto.window_simulator import pack
from lightning_remat.planners._auto.windows import windows_of


def knapsack(values: list[tuple[int, float]]) -> Graph:
    """Values of so many bytes and seconds, made from one source and read by one backward each; full at the end."""
    nodes = [Node("source", output_bytes=8)]
    for k, (size, seconds) in enumerate(values):
        at = len(nodes)
        nodes.append(Node(f"value{k}", inputs=(0,), output_bytes=size, gradient_bytes=0, forward_seconds=seconds))
        nodes.append(Node(f"use{k}", inputs=(at,), saved=(0, at), forward_seconds=1e-3))
    return Graph((*nodes, Node("loss", inputs=(0,), saved=(0,), forward_workspace_bytes=5000)))


def search_of(graph: Graph) -> Search:
    return Search(pack(graph), lambda peak, seconds, windows: None, most_actions=10**6)


def state_of(search: Search, graph: Graph, kept: list[int]) -> State:
    windows = windows_of(graph, search.problem, lower_kept(graph, kept))
    peak, seconds, _ = search.replay(windows)
    return State(peak, seconds, windows)


def test_two_small_values_are_held_instead_of_a_large_one():
    graph = knapsack([(1000, 10.0), (500, 5.2), (500, 5.2)])
    search = search_of(graph)
    small_dropped = state_of(search, graph, [0, 1])
    plain_seconds = sum(node.forward_seconds + node.backward_seconds for node in graph.nodes)
    assert small_dropped.seconds == pytest.approx(plain_seconds + 10.4)
    assert search.refill(small_dropped, small_dropped.peak_bytes).seconds == small_dropped.seconds
    found = search.exchange(small_dropped, small_dropped.peak_bytes)
    assert found.seconds == pytest.approx(plain_seconds + 10.0)
    assert found.peak_bytes <= small_dropped.peak_bytes


def test_a_large_value_is_held_instead_of_two_small_ones():
    graph = knapsack([(1000, 10.4), (500, 5.0), (500, 5.0)])
    search = search_of(graph)
    large_dropped = state_of(search, graph, [0, 3, 5])
    found = search.exchange(large_dropped, large_dropped.peak_bytes)
    assert found.seconds < large_dropped.seconds
    assert found.peak_bytes <= large_dropped.peak_bytes


@given(node_graphs(), st.data())
@settings(deadline=None, max_examples=60)
def test_an_exchange_keeps_the_limit_and_is_no_slower(graph: Graph, data: st.DataObject):
    search = search_of(graph)
    kept = data.draw(st.lists(st.integers(0, len(graph.nodes) - 1), unique=True))
    state = state_of(search, graph, kept)
    found = search.exchange(state, state.peak_bytes)
    assert found.seconds <= state.seconds
    assert found.peak_bytes <= state.peak_bytes
    windows_peak, windows_seconds, _ = search.replay(found.windows)
    assert (windows_peak, windows_seconds) == (found.peak_bytes, found.seconds)


def test_without_a_gain_nothing_is_exchanged():
    graph = knapsack([(500, 5.0), (500, 5.0)])
    search = search_of(graph)
    state = state_of(search, graph, [0, 1])
    assert search.exchange(state, state.peak_bytes) is state
    assert simulate(graph, lower_kept(graph, [0, 1])).peak_bytes == state.peak_bytes
