"""What runs again as one function."""

from __future__ import annotations

import copy

import torch
from rewriting import rewrite
from torch import nn
from training_steps import assert_equal_traces, traces

from lightning_remat import profile, trace
from lightning_remat.execution.instructions import Do
from lightning_remat.execution.program import compile_schedule
from lightning_remat.execution.stretches import Again
from lightning_remat.lowering import lower_kept
from lightning_remat.schedules.schedule import Schedule


def test_a_batch_norm_runs_again_with_its_neighbours_and_counts_once() -> None:
    """Where its own tape stays; what it writes in training goes to memory that nobody reads."""
    module = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU()) for _ in range(4)),
        nn.Conv2d(4, 4, 1),
    )
    x = torch.randn(2, 4, 6, 6)
    traced = trace(module, x)
    graph = profile(traced, x, repeats=1)
    again = [n for n, node in enumerate(graph.nodes) if node.kind in ("batch_norm", "gelu")]
    lowered = lower_kept(graph, {*range(len(graph.nodes))} - {*again})
    backward = next(k for k, action in enumerate(lowered) if action.kind == "B")
    kept_tapes = Schedule(tuple(a for k, a in enumerate(lowered) if a.kind != "T" or k > backward))
    program = compile_schedule(traced, kept_tapes, graph)
    stretches = [part for parts in program.before for part in parts if isinstance(part, Again)]
    joined = {graph.nodes[n].kind for part in stretches for what, n in part.instructions if what is Do.RUN_AGAIN}
    assert joined == {"batch_norm", "gelu"}
    ours, given = copy.deepcopy(module), torch.randn(2, 4, 6, 6)
    rewrite(ours, kept_tapes, x)
    assert_equal_traces(traces(module, [x, given, x]), traces(ours, [x, given, x]))
