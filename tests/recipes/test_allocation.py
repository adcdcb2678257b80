import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.node_graphs import node_graphs, relu_chain

from lightning_remat import Graph, Node, simulate
from lightning_remat.lowering import lower_kept
from lightning_remat.planners.dtr import plan_dtr
from remat_recipes.papers.allocation import Strategy, allocate
from remat_recipes.papers.lifetimes import lifetimes

STRATEGIES = ("none", "inplace", "sharing", "drop_bn_relu", "sublinear")


@st.composite
def elementwise_graphs(draw):
    """Random graphs in which many operations may work in place and many values have equal sizes."""
    graph = draw(node_graphs(most=10))
    kinds = st.sampled_from(["relu", "batch_norm", "conv2d", "add", "batch_norm+relu"])
    sizes = st.sampled_from([4, 4, 4, 8, 16])
    nodes = []
    for node in graph.nodes:
        change = {} if node.is_view else {"kind": draw(kinds), "output_bytes": draw(sizes)}
        nodes.append(Node(**{**{f: getattr(node, f) for f in Node.__dataclass_fields__}, **change}))
    return Graph(tuple(nodes), outputs=graph.outputs)


def replay(allocation):
    """Executes the step on a memory of bytes that each name the value written last; every read must find its own."""
    values = allocation.values
    memory = [-1] * allocation.total_bytes
    written = {v: [] for v in range(max((value.last for value in values), default=0) + 1)}
    read = {v: [] for v in written}
    for v, value in enumerate(values):
        written[value.made].append(v)
        for tick in value.uses:
            read[tick].append(v)
    for tick in written:
        for v in read[tick]:
            place = slice(allocation.offsets[v], allocation.offsets[v] + values[v].size_bytes)
            assert set(memory[place]) <= {v}, f"value {v} is overwritten before tick {tick}"
        for v in written[tick]:
            place = slice(allocation.offsets[v], allocation.offsets[v] + values[v].size_bytes)
            memory[place] = [v] * values[v].size_bytes
        for v in written[tick]:  # results of one operation do not share a place either
            place = slice(allocation.offsets[v], allocation.offsets[v] + values[v].size_bytes)
            assert set(memory[place]) <= {v}


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(elementwise_graphs(), st.sampled_from(STRATEGIES))
def test_every_read_finds_the_value_that_was_written(graph, strategy: Strategy):
    replay(allocate(graph, strategy))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(elementwise_graphs(), st.sampled_from(STRATEGIES))
def test_values_alive_together_lie_apart(graph, strategy: Strategy):
    allocation = allocate(graph, strategy)
    values, offsets = allocation.values, allocation.offsets
    for v, a in enumerate(values):
        assert 0 <= offsets[v] <= offsets[v] + a.size_bytes <= allocation.total_bytes
        for w, b in enumerate(values[:v]):
            if a.made > b.last or b.made > a.last or not a.size_bytes or not b.size_bytes:
                continue
            apart = offsets[v] + a.size_bytes <= offsets[w] or offsets[w] + b.size_bytes <= offsets[v]
            # In place: the later value takes over in the very operation that reads the earlier one last.
            assert apart or (w in a.may_overwrite and b.last == a.made)


@settings(max_examples=100, deadline=None)
@given(elementwise_graphs())
def test_each_strategy_improves_on_the_one_before(graph):
    none, inplace, sharing = (allocate(graph, s) for s in STRATEGIES[:3])
    assert none.total_bytes == sum(value.size_bytes for value in none.values)
    assert none.total_bytes >= inplace.total_bytes >= sharing.total_bytes
    # No allocation is below what is alive at one time, where an operand that is written over counts once.
    for tick in range(max(value.last for value in sharing.values) + 1):
        alive = sum(v.size_bytes for v in sharing.values if v.made < tick <= v.last)
        assert alive <= sharing.total_bytes


@settings(max_examples=60, deadline=None)
@given(node_graphs(most=8))
def test_every_value_alive_in_the_simulator_is_among_the_values(graph):
    # Without workspaces, parameters and passed-on storages both count the same bytes, step by step at the peak.
    plain = [
        Node(
            node.name, "op", node.inputs, node.saved, node.output_bytes, node.tape_bytes, storage_of=node.storage_of,
            shares_gradient=() if node.storage_of is None else None,
        )
        for node in graph.nodes
    ]  # fmt: skip
    graph = Graph(tuple(plain))
    schedule = lower_kept(graph, range(len(plain)))
    values = lifetimes(graph, schedule)
    alive = [sum(v.size_bytes for v in values if v.made <= t <= v.last) for t in range(max(v.last for v in values) + 1)]
    assert max(alive) >= simulate(graph, schedule).peak_bytes


def test_figure_1_in_place_and_sharing():
    # fullc, sigmoid, fullc, softmax: the sigmoid works in place, and so does its backward.
    sizes = {"output_bytes": 64}
    graph = Graph(
        (
            Node("fc1", "linear", (), (), **sizes),
            Node("sigmoid", "sigmoid", (0,), (1,), **sizes),
            Node("fc2", "linear", (1,), (1,), **sizes),
            Node("softmax", "softmax", (2,), (3,), **sizes),
        )
    )
    allocation = allocate(graph, "inplace")
    place = {(v.kind, v.node): b for v, b in zip(allocation.values, allocation.buffers, strict=True)}
    assert place["output", 0] == place["output", 1]
    assert place["gradient", 1] == place["gradient", 0]
    assert [allocate(graph, s).total_bytes // 64 for s in STRATEGIES[:3]] == [8, 6, 4]


def test_relus_work_in_place():
    graph = relu_chain(4, output_bytes=100)
    assert [allocate(graph, s).total_bytes for s in STRATEGIES[:3]] == [800, 500, 500]


@pytest.mark.slow
def test_sublinear_plan_of_a_chain_grows_with_the_square_root():
    def total(length, strategy):
        graph = relu_chain(length, output_bytes=1)
        # A convolution between any two of them would not change the count: nothing here works in place.
        nodes = tuple(Node(n.name, "conv2d", n.inputs, n.inputs, n.output_bytes) for n in graph.nodes)
        return allocate(Graph(nodes), strategy).total_bytes

    assert total(1024, "sharing") >= 1000
    small, large = total(256, "sublinear"), total(1024, "sublinear")
    assert large <= 3 * 1024**0.5
    assert 1.7 <= large / small <= 2.3


def test_dropped_batch_norm_and_relu_run_again():
    def block(at):
        conv = Node(f"conv{at}", "conv2d", (at - 1,) if at else (), (at - 1,) if at else (), 100)
        norm = Node(f"bn{at}", "batch_norm", (at,), (at,), 100)
        return conv, norm, Node(f"relu{at}", "relu", (at + 1,), (at + 2,), 100)

    graph = Graph(tuple(node for at in range(0, 30, 3) for node in block(at)))
    dropped = allocate(graph, "drop_bn_relu")
    assert dropped.total_bytes < allocate(graph, "sharing").total_bytes
    again = {a.node for a in dropped.schedule if a.kind == "F"}
    runs = [sum(a == ("F", n) for a in dropped.schedule) for n in sorted(again)]
    assert max(runs[0::3]) == 1
    assert min(runs[2::3][:-1]) == 2


@pytest.mark.slow
def test_a_schedule_of_any_planner_can_be_allocated():
    graph = relu_chain(30)
    schedule = plan_dtr(graph, 1200)
    allocation = allocate(graph, schedule=schedule)
    assert allocation.total_bytes <= 1400 < allocate(graph).total_bytes
    replay(allocation)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"strategy": "greedy"}, "expected one of"), ({"strategy": "sublinear", "schedule": 1}, "its own schedule")],
)
def test_mistakes_are_named(options, words):
    graph = relu_chain(3)
    if "schedule" in options:
        options["schedule"] = lower_kept(graph, range(3))
    with pytest.raises(ValueError, match=words):
        allocate(graph, **options)
