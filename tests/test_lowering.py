import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import lowering_reference as reference
from random_graphs import graphs, schedules

from lightning_remat import Graph, Node, Schedule, simulate
from lightning_remat.lowering import apply_liveness, lower_kept


def relus(count: int) -> Graph:
    return Graph(tuple(Node(f"n{i}", inputs=(i - 1,) if i else (), saved=(i,), output_bytes=1) for i in range(count)))


def test_goldens() -> None:
    graph = relus(4)
    assert str(lower_kept(graph, range(4))) == "F0 F1 F2 F3 B3 D3 B2 D2 B1 D1 B0 D0"
    assert str(lower_kept(graph, {1, 3})) == "F0 F1 D0 F2 F3 D2 B3 D3 F2 B2 D2 F0 B1 D1 B0 D0".replace(
        "F2 B2 D2 F0 B1 D1 B0 D0", "F2 B2 D2 B1 D1 F0 B0 D0"
    )


def test_a_view_is_kept_with_its_storage() -> None:
    nodes = (
        Node("a", output_bytes=4),
        Node("v", inputs=(0,), storage_of=0),
        Node("b", inputs=(1,), saved=(0,), output_bytes=1),
    )
    assert str(lower_kept(Graph(nodes), {0, 2})) == "F0 F1 F2 D1 D2 B2 D0 B1 B0"


def test_liveness_moves_discards_to_the_last_use() -> None:
    schedule = Schedule.parse("F0 F1 F2 B2 B1 B0 D2 D1 D0")
    assert str(apply_liveness(relus(3), schedule)) == "F0 F1 F2 B2 D2 B1 D1 B0 D0"


@pytest.mark.slow
@given(st.data())
def test_any_kept_set_gives_a_valid_schedule_with_at_most_one_recomputation(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    indices = st.sets(st.integers(0, len(graph.nodes) - 1))
    schedule = lower_kept(graph, data.draw(indices), data.draw(st.none() | indices))
    simulate(graph, schedule)
    for n in range(len(graph.nodes)):
        assert 1 <= sum(a == ("F", n) for a in schedule) <= 2


@pytest.mark.slow
@given(graphs())
def test_keeping_everything_recomputes_nothing(graph: Graph) -> None:
    assert simulate(graph, lower_kept(graph, range(len(graph.nodes)))).recompute_seconds == 0


@pytest.mark.slow
@given(st.data())
def test_equals_the_reference(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    indices = st.sets(st.integers(0, len(graph.nodes) - 1))
    outputs, tapes = data.draw(indices), data.draw(st.none() | indices)
    assert lower_kept(graph, outputs, tapes) == reference.lower_kept(graph, outputs, tapes)
    schedule = data.draw(schedules(graph))
    assert apply_liveness(graph, schedule) == reference.apply_liveness(graph, schedule)
