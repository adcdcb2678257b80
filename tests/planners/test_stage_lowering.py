from __future__ import annotations

from collections import Counter

import pytest
from chain_examples import lower_sequence
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles.block_graphs import block_graphs, persistent_sequences
from oracles.node_graphs import relu_chain

from lightning_remat import Graph, Node, simulate
from lightning_remat.chain import ChainSequence, replay
from lightning_remat.errors import InfeasibleBudgetError
from lightning_remat.lowering import lower_kept
from lightning_remat.planners import rotor
from lightning_remat.planners._chain.stages import cut_stages, stage_figures, to_chain


def lower(graph: Graph, text: str) -> str:
    return str(lower_sequence(graph, cut_stages(graph), ChainSequence.parse(text)))


def test_the_operations_of_a_plain_chain():
    # An activation kept for one backward is there for the one before it, which reads it too.
    graph = relu_chain(3)
    assert lower(graph, "Fall1 Fall2 Fall3 B3 B2 B1") == "F0 F1 F2 B2 D2 B1 D1 B0 D0"
    assert lower(graph, "Fck1 Fn2 Fall3 B3 Fck1 Fall2 B2 Fall1 B1") == ("F0 F1 D0 F2 D1 B2 D2 F0 F1 B1 D1 B0 D0")
    assert lower(graph, "Fck1 Fck2 Fall3 B3 Fall2 B2 Fall1 B1") == "F0 F1 F2 B2 D2 B1 D1 B0 D0"


def test_only_what_a_backward_reads_is_run_again():
    conv = Node("conv", inputs=(0,), saved=(0,), output_bytes=9)
    norm = Node("bn", inputs=(1,), saved=(1,), output_bytes=9)
    graph = Graph((Node("relu", saved=(0,), output_bytes=9), conv, norm))
    assert lower(graph, "Fall1 Fck2 Fall3 B3 Fall2 B2 B1") == "F0 F1 F2 D2 B2 D1 B1 B0 D0"


def test_a_view_is_made_again_with_its_base():
    nodes = (
        Node("relu", saved=(0,), output_bytes=8),
        Node("flatten", inputs=(0,), storage_of=0),
        Node("fc", inputs=(1,), saved=(1,), output_bytes=4),
        Node("exp", inputs=(2,), saved=(3,), output_bytes=4),
        Node("loss", inputs=(3,), saved=(3,), output_bytes=1),
    )
    graph = Graph(nodes)
    schedule = lower_sequence(graph, cut_stages(graph), ChainSequence.parse("Fck1 Fn2 Fall3 B3 Fck1 Fall2 B2 Fall1 B1"))
    runs = Counter(n for kind, n in schedule.actions if kind == "F")
    assert runs[0] == runs[1] == 2
    simulate(graph, schedule)


@pytest.mark.slow
@given(block_graphs(most=4), st.data())
@settings(deadline=None, max_examples=150)
def test_every_sequence_becomes_a_valid_schedule_that_is_no_slower(graph: Graph, data: st.DataObject):
    stages = cut_stages(graph)
    assume(len(stages) <= 5)
    sequences = list(persistent_sequences(1, len(stages)))
    text = data.draw(st.sampled_from(sequences))
    chain = to_chain(tuple(stage_figures(graph, stage) for stage in stages))
    simulation = simulate(graph, lower_sequence(graph, stages, ChainSequence.parse(text)))
    assert simulation.seconds <= replay(chain, text).makespan


@pytest.mark.slow
@given(block_graphs(most=5), st.floats(0.3, 1.0))
@settings(deadline=None, max_examples=100)
def test_floating_sequences_become_valid_schedules(graph: Graph, fraction: float):
    stages = cut_stages(graph)
    chain = to_chain(tuple(stage_figures(graph, stage) for stage in stages))
    plain = " ".join([*(f"Fall{k}" for k in range(1, len(stages) + 1)), *(f"B{k}" for k in range(len(stages), 0, -1))])
    budget = int(fraction * replay(chain, plain).peak)
    try:
        sequence = rotor.solve(chain, budget, slots=None, floating=True)
    except InfeasibleBudgetError:
        return
    simulate(graph, lower_sequence(graph, stages, sequence))


@given(block_graphs())
@settings(deadline=None, max_examples=100)
def test_keeping_everything_is_plain_autograd(graph: Graph):
    stages = cut_stages(graph)
    count = len(stages)
    plain = " ".join([*(f"Fall{k}" for k in range(1, count + 1)), *(f"B{k}" for k in range(count, 0, -1))])
    ours = simulate(graph, lower_sequence(graph, stages, ChainSequence.parse(plain)))
    theirs = simulate(graph, lower_kept(graph, range(len(graph.nodes))))
    assert (ours.peak_bytes, ours.seconds) == (theirs.peak_bytes, theirs.seconds)
