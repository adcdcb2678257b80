"""What runs again as one function."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from rewriting import rewrite
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_steps import assert_equal_traces, traces

from lightning_remat import profile, trace
from lightning_remat.execution.instructions import Do
from lightning_remat.execution.program import Program, compile_schedule
from lightning_remat.execution.rewriter import programs_in
from lightning_remat.execution.stretches import Again
from lightning_remat.lowering import lower_kept
from lightning_remat.module_state.random_state import generators_in_use
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


def _blocks(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(dropout)) for _ in range(4)), nn.Linear(8, 8)
    )


def _rewritten(module: nn.Module, x: torch.Tensor) -> Program:
    """Rewrites it so that it recomputes all but linear maps; its program."""
    traced = trace(module, x)
    graph = profile(traced, x, repeats=1)
    kept = {n for n, node in enumerate(graph.nodes) if node.kind == "linear"}
    rewrite(module, lower_kept(graph, kept), x)
    (program,) = programs_in(module)
    return program


def test_hooked_and_random_operations_do_not_divide_a_forward() -> None:
    plain, x = _blocks(dropout=0.5), torch.randn(4, 8)
    ours = copy.deepcopy(plain)
    program = _rewritten(ours, x)
    assert program.hooked
    assert any(step.operation.is_random for step in program.steps)
    alone = [part for part in program.stretches if not callable(part)]
    assert {n for _, n in alone} == set(program.traced.outputs), "but for what the caller gets"
    torch.manual_seed(0)
    expected = traces(plain, [x, x, x])
    torch.manual_seed(0)
    assert_equal_traces(expected, traces(ours, [x, x, x]))


def test_an_error_within_a_hooked_operation_leaves_no_hook_and_no_lock() -> None:
    plain, x = _blocks(dropout=0.5), torch.randn(4, 8)
    ours = copy.deepcopy(plain)
    _rewritten(ours, x)
    ours(x).sum().backward()  # what is learned in a first step
    for name in ("gelu", "bernoulli"):
        with pytest.raises(MemoryError), Failing(name):
            ours(x)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        with ThreadPoolExecutor(1) as other:
            assert other.submit(generators_in_use.acquire, blocking=False).result(), name
            other.submit(generators_in_use.release).result()
    plain.zero_grad()
    ours.zero_grad()
    torch.manual_seed(1)
    expected = traces(plain, [x])
    torch.manual_seed(1)
    assert_equal_traces(expected, traces(ours, [x]))


class Failing(TorchDispatchMode):
    """Kernels of an operation find no memory."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._name in str(func):
            raise MemoryError(self._name)
        return func(*args, **(kwargs or {}))
