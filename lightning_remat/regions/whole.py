"""Plans a module that is captured as a whole; the plain and the planned step are run once, and tell what they need."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..capture.tracer import out_of_place
from ..errors import InfeasibleBudgetError
from ..execution.assembly import checked_program
from ..execution.modified import retried
from ..execution.rewriter import current_plan, forced, install, restore
from ..lowering import keep_everything
from ..module_state.batches import tensors_held
from ..module_state.nesting import flatten
from ..operations.operation import TracedModule
from ..plans.plan import Plan
from ..plans.planner import fastest_plan
from ..profiling.profiler import profile_arguments
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ..schedules.simulator import Simulation, simulate
from .profiles import known_profile
from .step_run import WORTH_ANOTHER, beside_operations, infeasible_as_run, plain_step_peak, step_peak

logger = logging.getLogger("lightning_remat")

_MOST_STEPS = 4
"""Planned steps that are run at most before it is the lowest one's turn; one, unless it exceeds the budget."""


def rewrite_whole(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    traced: TracedModule,
    *,
    budget_of: Callable[[int], int],
    planner: str | Callable[..., Schedule],
) -> Plan:
    """The plan by which a module now runs; see `rematerialize`.

    In-place activations are operations of their own where the budget cannot be met otherwise.

    Args:
        module: Not rewritten yet.
        args: Positional arguments of a step.
        kwargs: Keyword arguments.
        traced: The module's operations.
        budget_of: The budget in bytes, given the plain step's peak.
        planner: A name of `PLANNERS` or a function.

    Raises:
        InfeasibleBudgetError: No plan fits, either way.
    """
    whole = _Whole(module, args, kwargs, planner).with_way(traced)
    plain, beside_seconds = whole.plain()
    whole, budget_bytes = replace(whole, beside_seconds=beside_seconds), budget_of(plain.peak_bytes)
    try:
        return whole.fitted(budget_bytes, plain)
    except InfeasibleBudgetError:
        apart = out_of_place(traced, args, kwargs)
        if apart is None:
            raise
        return whole.with_way(apart).fitted(budget_bytes, plain)


@dataclass(frozen=True, slots=True, eq=False)
class _Whole:
    """A module and the arguments of a step, with its operations and their profile in each way in which they may run.

    What it takes beside its operations see `Plan`.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    planner: str | Callable[..., Schedule]
    ways: tuple[TracedModule, ...] = ()
    graphs: tuple[Graph, ...] = ()
    beside_seconds: float = 0.0

    @property
    def can_run(self) -> bool:
        """Whether a step tells what the plan needs: on fake tensors nothing runs, in eval mode the plain forward."""
        return self.module.training and not self.is_fake

    @property
    def is_fake(self) -> bool:
        """Whether it is on fake tensors."""
        tensors = [*tensors_held((self.args, self.kwargs)), *self.module.parameters()]
        return any(isinstance(t, FakeTensor) for t in tensors)

    def with_way(self, traced: TracedModule) -> _Whole:
        """The same with one way more, profiled."""
        leaves = flatten((self.args, self.kwargs))[0]
        graph = known_profile(traced, leaves, {}, lambda: profile_arguments(traced, self.args, self.kwargs))
        return replace(self, ways=(*self.ways, traced), graphs=(*self.graphs, graph))

    def plain(self) -> tuple[Simulation, float]:
        """The step without a plan, run where it can be, and seconds of it beside its operations."""
        predicted = simulate(self.graphs[0], keep_everything(self.graphs[0]), holds_outputs=False)
        if not self.can_run:
            return predicted, 0.0
        peak = plain_step_peak(self.module, self.args, self.kwargs, predicted.peak_bytes, is_module_alone=True)
        if peak is None:
            return predicted, 0.0
        beside = 0.0
        if not any(operation.is_random for operation in self.ways[0].operations):  # to see what is drawn takes time
            count = len(self.graphs[0].nodes)
            beside = beside_operations(self.module, self.args, self.kwargs, predicted.seconds, count, draws="none")
        return predicted.corrected(peak - predicted.peak_bytes, beside), beside

    def fitted(self, budget_bytes: int, plain: Simulation) -> Plan:
        """The plan by which the executed step stays within the budget, installed.

        What it needs otherwise than predicted (a loss that lets go of outputs early, memory that operations hand to
        each other) corrects the prediction. A step that exceeds the budget is planned again for as much less, in the
        end at the lowest peak; one that leaves room, once for as much more.

        Args:
            budget_bytes: What the step must not exceed.
            plain: The module's step without a plan.
        """
        allowed = budget_bytes
        if plain.peak_bytes <= budget_bytes:  # planners count outputs for longer than a loss holds them
            graph = self.graphs[0]
            allowed = max(allowed, simulate(graph, keep_everything(graph)).peak_bytes)
        for number in range(_MOST_STEPS):
            infeasible: InfeasibleBudgetError | None = None
            try:
                made = fastest_plan(self.graphs, allowed if number < _MOST_STEPS - 1 else 1, self.planner)
            except InfeasibleBudgetError as error:
                if not self.can_run:
                    raise
                infeasible = error  # of a prediction: what the lowest peak is, a step has yet to tell
                made = fastest_plan(self.graphs, error.sufficient_bytes, self.planner)
            predicted = made.peak_bytes
            made = self._run(replace(made, budget_bytes=budget_bytes), plain)
            if made.peak_bytes <= budget_bytes or not self.can_run:
                return self._faster(made, plain)
            restore(self.module)
            if infeasible is not None:
                raise infeasible_as_run(infeasible, made.peak_bytes, budget_bytes, plain.peak_bytes)
            allowed = min(allowed, predicted) - (made.peak_bytes - budget_bytes)
        raise AssertionError("a planner that meets a budget of one byte")

    def _faster(self, made: Plan, plain: Simulation) -> Plan:
        """A plan for the room that the measured step leaves in the budget, if it recomputes less; else the same."""
        room = made.budget_bytes - made.peak_bytes
        if made.correction_bytes >= 0 or not made.num_recomputed or room < WORTH_ANOTHER * made.peak_bytes:
            return made
        other = fastest_plan(self.graphs, made.budget_bytes - made.correction_bytes, self.planner)
        if other.simulation.recompute_seconds >= made.simulation.recompute_seconds:
            return made
        other = self._run(replace(other, budget_bytes=made.budget_bytes), plain)
        if other.peak_bytes <= made.budget_bytes:
            return other
        forced(self.module, checked_program(self.ways, made), made, self.planner)
        return made

    def _run(self, plan: Plan, plain: Simulation) -> Plan:
        """Installs a plan and corrects its prediction by a step; the module stays rewritten by it."""
        program = checked_program(self.ways, plan)
        plan = replace(plan, rung=program.traced.rung, reasons=program.traced.reasons)
        install(self.module, program, plan, self.planner)
        is_installed = current_plan(self.module) is not None
        if not self.can_run:
            name, rest = type(self.module).__name__, ""
            if self.is_fake:
                rest = "; what kernels allocate inside themselves fake tensors do not tell"
            logger.info("%s: the peak is predicted, no step was run to measure it%s", name, rest)
            return replace(plan, plain=plain)
        if not is_installed:  # what runs is the plain step
            made = plan.corrected(plain.peak_bytes - plan.peak_bytes, self.beside_seconds)
            return replace(made, plain=made.simulation)
        measured = retried(lambda: step_peak(self.module, self.args, self.kwargs, is_module_alone=True))
        made = replace(plan.corrected(measured - plan.peak_bytes, self.beside_seconds), plain=plain)
        forced(self.module, program, made, self.planner)
        return made
