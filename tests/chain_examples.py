"""Chains for tests: the worked examples of beaumont2024 and random ones."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from lightning_remat import Graph, Schedule
from lightning_remat.chain import Chain, ChainSequence, Stage
from lightning_remat.planners._chain.stage_lowering import lower_steps, stage_arrays
from lightning_remat.planners._chain.stages import GraphStage
from lightning_remat.planners._chain.steps import to_steps
from lightning_remat.schedules.arrays import decode, graph_arrays


def lower_sequence(graph: Graph, stages: Sequence[GraphStage], sequence: ChainSequence) -> Schedule:
    """A sequence of a graph's stages as a schedule."""
    return decode(graph, lower_steps(graph_arrays(graph), stage_arrays(stages), to_steps(sequence)))


# beaumont2024, Table 2: (a, abar, o_f, o_b, u_f, u_b) in MB and milliseconds; the loss is free.
_TOY_ROWS = (
    (9.54, 9.54, 0.00, 20.01, 1.60, 3.05),
    (10.68, 10.68, 0.00, 27.64, 2.20, 4.48),
    (11.06, 11.08, 0.00, 30.99, 2.44, 5.09),
    (10.68, 10.66, 0.00, 30.99, 2.51, 4.93),
    (9.54, 9.54, 0.00, 27.64, 2.10, 4.21),
    (7.63, 7.63, 0.00, 19.08, 1.43, 3.34),
    (0, 0, 0.00, 0.00, 0.00, 0.00),
)
TOY = Chain(7.63, tuple(Stage(a, abar, uf, ub, of, ob) for a, abar, of, ob, uf, ub in _TOY_ROWS))
TOY_SEQUENCE = "Fck1 Fn2 Fn3 Fall4 Fall5 Fall6 Fall7 B7 B6 B5 B4 Fck1 Fn2 Fall3 B3 Fall1 Fall2 B2 B1"


def figure_4(n: int) -> Chain:
    """The chain of Figure 4, on which no memory-persistent sequence is optimal from n = 5 on (budget 15)."""
    num_layers = n + 2
    outputs = [0, 1] + [3] * (num_layers - 2) + [4, 0]
    seconds = [n - 2, 2] + [0] * (num_layers - 1)
    return Chain(0, tuple(Stage(a, a, u, 0) for a, u in zip(outputs[1:], seconds, strict=True)))


def homogeneous(num_stages: int) -> Chain:
    return Chain(1, (Stage(1, 1, 1, 1),) * num_stages)


@st.composite
def chains(draw: st.DrawFn, max_stages: int = 5, largest: int = 6) -> Chain:
    """Chains of whole numbers, a tape holding at least its output."""
    size = st.integers(0, largest)
    workspace = st.one_of(st.just(0), size)

    def stage() -> Stage:
        output = draw(size)
        tape = output + draw(size)
        return Stage(output, tape, draw(size), draw(size), draw(workspace), draw(workspace))

    return Chain(draw(size), tuple(stage() for _ in range(draw(st.integers(1, max_stages)))))


def plain_peak(chain: Chain) -> float:
    """A budget within which nothing need be recomputed, and somewhat more."""
    stages = chain.stages
    workspaces = max(max(s.forward_workspace_bytes, s.backward_workspace_bytes) for s in stages)
    outputs = 2 * max(chain.input_bytes, *(s.output_bytes for s in stages))
    return chain.input_bytes + sum(s.saved_bytes for s in stages) + outputs + workspaces
