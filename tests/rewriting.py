"""Rewrites modules by schedules that a test chooses, and compares their steps with the plain ones."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Iterable
from typing import Any

from torch import Tensor, nn
from training_steps import assert_equal_traces, loss_of, traces

from lightning_remat import Graph, Plan, profile, rematerialize, simulate, trace
from lightning_remat.execution.assembly import compile_schedule
from lightning_remat.execution.rewriter import forced, watched
from lightning_remat.lowering import lower_kept
from lightning_remat.operations.operation import TracedModule
from lightning_remat.schedules.schedule import Schedule


class Between(nn.Module):
    """Layers around a function, so that there is something to recompute before and after it."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.does = nn.Linear(6, 6), nn.Linear(6, 6), does

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.does(self.first(x).sigmoid())).sigmoid()


@contextlib.contextmanager
def counted_runs(module: nn.Module) -> Generator[list[str]]:
    """Names of the operations that the executor runs inside, in order."""
    runs: list[str] = []

    class Counts:
        def ended(self, name: str, made: list[object], *, is_first: bool) -> None:
            runs.append(name)

    with watched(module, Counts()):
        yield runs


def rewrite(module: nn.Module, schedule: Schedule | Iterable[int], *args: Any, **kwargs: Any) -> TracedModule:
    """Installs a schedule, or the one that keeps the given operations, whether or not it recomputes."""
    traced = trace(module, *args, **kwargs)
    graph = profile(traced, *args, repeats=1, **kwargs)
    chosen = schedule if isinstance(schedule, Schedule) else lower_kept(graph, set(schedule))
    simulation = simulate(graph, chosen)
    plain = simulate(graph, lower_kept(graph, range(len(graph.nodes))))
    plan = Plan("test", simulation.peak_bytes, chosen, simulation, graph, plain)
    forced(module, compile_schedule(traced, chosen, graph), plan)
    return traced


def recomputing_copy(module: nn.Module, *args: Any, kept: Iterable[int] = (), **kwargs: Any) -> nn.Module:
    """A copy that recomputes all but the given operations."""
    ours = copy.deepcopy(module)
    rewrite(ours, kept, *args, **kwargs)
    return ours


def keep_nothing(graph: Graph, _budget_bytes: int) -> Schedule:
    """A planner: everything is computed again, from the inputs."""
    return lower_kept(graph, ())


def rematerialized_copy(module: nn.Module, *args: Any) -> nn.Module:
    """A copy that recomputes all that its backward reads, as a whole or in the parts that can be captured."""
    ours = copy.deepcopy(module)
    made = rematerialize(ours, *args, memory_budget=1 << 30, planner=keep_nothing)
    if not made.num_recomputed:  # parts under one budget keep all where that fits
        made = rematerialize(ours, *args, memory_budget=made.plain.peak_bytes - 1, planner="periodic")
    assert made.num_recomputed > 0
    return ours


def step_on_all_outputs(module: nn.Module, args: tuple[Any, ...]) -> Tensor:
    """One forward and backward on a tuple of arguments."""
    loss = loss_of(module(*args))
    loss.backward()
    return loss


def assert_equal_steps(
    module: nn.Module,
    *args: Any,
    kept: Iterable[Iterable[int]] = ((), (1,)),
    step: Callable[[nn.Module, Any], Tensor] = step_on_all_outputs,
) -> None:
    """Three training steps are bitwise equal to the plain ones, for each set of kept operations."""
    copies = [recomputing_copy(module, *args, kept=k) for k in kept]
    plain = traces(copy.deepcopy(module), [args] * 3, step=step)
    assert any("grad" in name for name in plain)
    for ours in copies:
        assert_equal_traces(plain, traces(ours, [args] * 3, step=step))
