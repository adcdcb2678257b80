from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from oracles.block_graphs import block_graphs
from oracles.node_graphs import node_graphs, relu_chain

from lightning_remat import Graph, Node, simulate
from lightning_remat.chain import replay
from lightning_remat.lowering import lower_kept
from lightning_remat.planners._chain.stages import cut_stages, stage_figures, to_chain


def spans(graph: Graph) -> list[tuple[int, int]]:
    return [(s.start, s.stop) for s in cut_stages(graph)]


def node(name: str, *inputs: int, saved: tuple[int, ...] = (), size: int = 10, **fields: object) -> Node:
    return Node(name, inputs=inputs, saved=saved, output_bytes=size, **fields)  # type: ignore[arg-type]


def test_every_saved_value_of_a_plain_chain_is_a_cut():
    assert spans(relu_chain(4)) == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_a_value_that_no_backward_reads_is_no_cut():
    # conv saves its input, batch norm too, relu its output: batch norm's output goes at once.
    graph = Graph((node("conv"), node("bn", 0, saved=(0,)), node("relu", 1, saved=(2,)), node("fc", 2, saved=(2,))))
    assert spans(graph) == [(0, 1), (1, 3), (3, 4)]


def test_a_skip_holds_its_block_together():
    block = (node("a", saved=(0,)), node("b", 0, saved=(1,)), node("add", 0, 1), node("relu", 2, saved=(3,)))
    graph = Graph((*block, node("head", 3, saved=(3,))))
    assert spans(graph) == [(0, 1), (1, 4), (4, 5)]
    stages = cut_stages(graph)
    assert (stages[1].entry, stages[1].exit) == ((0,), (3,))
    assert stages[1].saved == {1, 3}


def test_dense_connections_are_one_stage():
    graph = Graph(tuple(node(f"n{i}", *range(i), saved=(i,)) for i in range(5)))
    assert spans(graph) == [(0, 1), (1, 5)] or spans(graph) == [(0, 5)]
    long_skip = Graph((node("a", saved=(0,)), node("b", 0, saved=(1,)), node("c", 1, saved=(2,)), node("d", 2, 0)))
    assert spans(long_skip) == [(0, 1), (1, 4)]


def test_a_storage_seen_through_views_is_one_storage_and_cuts_once():
    view = Node("flatten", inputs=(0,), storage_of=0)
    graph = Graph((node("relu", saved=(0,)), view, node("fc", 1, saved=(1,)), node("loss", 2, saved=(2,))))
    assert spans(graph) == [(0, 1), (1, 3), (3, 4)]
    both = Graph((node("relu", saved=(0,)), view, node("fc", 0, 1, saved=(1,)), node("loss", 2, saved=(2,))))
    assert spans(both) == [(0, 1), (1, 3), (3, 4)]


def test_figures_of_a_stage_by_hand():
    costs = {"tape_bytes": 3, "forward_workspace_bytes": 7, "backward_workspace_bytes": 100, "parameter_bytes": 5}
    middle = node("middle", 0, saved=(0, 1), size=20, forward_seconds=2.0, backward_seconds=4.0, **costs)
    graph = Graph((node("first", saved=(0,)), middle, node("last", 1, saved=(1,))))
    figures = stage_figures(graph, cut_stages(graph)[1])
    assert figures.output_bytes == figures.gradient_bytes == 20
    assert figures.tape_bytes == 23
    # Beyond the input of 10 bytes: output, tape and workspace.
    assert figures.keep_peak_bytes == figures.fall_peak_bytes == 30
    assert figures.drop_peak_bytes == 40
    # Output, tape, both gradients, the parameters' and the workspace.
    assert figures.back_peak_bytes == 20 + 3 + 20 + 10 + 5 + 100
    assert figures.leaf_peak_bytes == figures.back_peak_bytes - figures.gradient_bytes
    assert (figures.forward_seconds, figures.leaf_seconds, figures.backward_seconds) == (2.0, 2.0, 4.0)
    assert figures.parameter_bytes == 5


def test_a_recomputation_for_its_own_backward_leaves_out_what_only_the_next_stage_reads():
    # The convolution's output is saved by the batch norm: its own backward reads the input alone.
    # No more than the gradient of the input comes up.
    conv = node("conv", 0, saved=(0,), size=20, forward_seconds=9.0)
    graph = Graph((node("relu", saved=(0,)), conv, node("bn", 1, saved=(1,))))
    figures = stage_figures(graph, cut_stages(graph)[1])
    assert (figures.forward_seconds, figures.leaf_seconds, figures.leaf_peak_bytes) == (9.0, 0.0, 10)


@given(block_graphs())
@settings(deadline=None, max_examples=100)
def test_stages_partition_the_graph_and_share_one_storage(graph: Graph):
    stages = cut_stages(graph)
    assert [n for stage in stages for n in stage.nodes] == list(range(len(graph.nodes)))
    for before, stage in pairwise(stages):
        assert stage.entry == before.exit
        assert len({graph.roots[n] for n in stage.entry}) <= 1
        assert all(graph.roots[n] in before.nodes for n in stage.entry)
        read = {i for n in stage.nodes for i in (*graph.nodes[n].inputs, *graph.nodes[n].saved) if i < stage.start}
        assert read <= set(stage.entry)


@given(node_graphs())
@settings(deadline=None, max_examples=100)
def test_the_chain_takes_the_graphs_seconds(graph: Graph):
    figures = tuple(stage_figures(graph, stage) for stage in cut_stages(graph))
    chain = to_chain(figures)
    count = len(figures)
    plain = " ".join([*(f"Fall{k}" for k in range(1, count + 1)), *(f"B{k}" for k in range(count, 0, -1))])
    seconds = simulate(graph, lower_kept(graph, range(len(graph.nodes)))).seconds
    assert replay(chain, plain).makespan == seconds
