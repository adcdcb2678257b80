"""Rewrites the parts of a module that cannot be captured as a whole, under one budget for the whole step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from ..capture.dynamo import CapturedGraph
from ..errors import InfeasibleBudgetError, TraceError
from ..execution.assembly import checked_program
from ..execution.modified import retried
from ..execution.rewriter import install_regions, restore
from ..lowering import keep_everything
from ..measure.bandwidth import Bandwidth, bandwidth_of
from ..module_state.agreement import all_ranks, first_rank, together
from ..module_state.batches import as_new, tensors_held
from ..module_state.refusals import reason_against
from ..module_state.sharding import has_units, whole_parts
from ..operations.operation import TracedModule
from ..plans.plan import Plan, StepPlan, plain_timeline
from ..plans.planner import planner_of
from ..plans.step_memory import Surroundings
from ..plans.step_planner import plan_step
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ..schedules.simulator import simulate
from .calls import View
from .chosen_modules import submodules
from .fit import check_fit
from .footprint import outside_bytes
from .gathering import gathering_of, reshard_as_planned, units_in
from .handed_on import handed_on
from .look_through import look_through
from .search import find_regions, is_exchanged, parts_of, profiled_out_of_place, programs_of
from .step_run import WORTH_ANOTHER, beside_operations, infeasible_as_run, plain_step_peak, step_peak, untouched

_MOST_STEPS = 4
"""Planned steps that are run at most to learn what the code between the regions needs."""


def rewrite_regions(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: TraceError,
    *,
    budget_of: Callable[[int], int],
    planner: str | Callable[..., Schedule],
    plan: Plan | None,
    gather_bandwidth: Bandwidth | None,
) -> Plan:
    """The plan by which the parts of a module now run; see `rematerialize`.

    Args:
        module: Not rewritten yet.
        args: Positional arguments of a step.
        kwargs: Keyword arguments.
        error: Why the module cannot be captured as a whole.
        budget_of: The budget in bytes, given the plain step's peak.
        planner: A name of `PLANNERS` or a function.
        plan: A plan made earlier for this module, which is installed as it is.
        gather_bandwidth: See `rematerialize`.

    Raises:
        TraceError: No part of the module can be captured.
        InfeasibleBudgetError: No plan fits.
        ValueError: `plan` was made for another module.
    """

    def call() -> object:
        own_args, own_kwargs = as_new((args, kwargs))
        return module(*own_args, **own_kwargs)

    def look(watched: Sequence[Any] | None) -> View:
        return look_through(module, call, watched, undone=lambda: untouched(module, args, kwargs))

    if plan is not None:
        _install_earlier(module, look, plan, error)
        return plan
    is_sharded = has_units(module)
    can_divide = not is_sharded and reason_against(module) is None and not is_exchanged(module)
    parts = whole_parts if is_sharded else parts_of
    regions = find_regions(look, ["[]"] if can_divide else list(parts(module)))
    if can_divide and not any(call.trains for call in regions.view.calls):
        regions = find_regions(look, list(parts_of(module)))
    profiles = first_rank(module, regions.profiled)
    # Only where there is anything to discard.
    graphs = {k: g for k, g in profiles.items() if len(g.nodes) > 1 or any(node.tape_bytes for node in g.nodes)}
    if not graphs:
        raise TraceError(
            f"{error}. Nor can its submodules be rematerialized one by one:{regions.tried}", where=error.where
        ) from error
    view = replace(regions.view, calls=[call for call in regions.view.calls if call.name in graphs])
    parts = _Parts(
        module,
        args,
        kwargs,
        keys=tuple(call.name for call in view.calls),
        graphs=graphs,
        traced=regions.traced,
        reasons=(str(error), *regions.reasons),
        units=tuple(units_in(view)),
        left=regions.left,
    )
    batch = tensors_held((args, kwargs))
    around = Surroundings(
        max(all_ranks(module, outside_bytes(module, view, batch))),
        optimizer_step_bytes=0,
        is_alone=True,
        gathering=gathering_of(view, bandwidth_of(module, gather_bandwidth)),
        order=view.order,
        over=view.over,
        handed_on=first_rank(module, partial(handed_on, module, view, batch)),
    )
    del regions, view  # they hold the arguments of all calls, which the steps to be measured make again
    if not is_sharded:
        parts = parts.measured(around)
        around = around.corrected(parts.plain_correction_bytes or 0)
    try:
        return _fitted(parts, around, budget_of, planner)
    except InfeasibleBudgetError:
        restore(module)
        parts = parts.with_apart(look)
        if not parts.apart:
            raise
        return _fitted(parts, around, budget_of, planner)


def _install_earlier(
    module: nn.Module, look: Callable[[Sequence[Any] | None], View], plan: Plan, error: TraceError
) -> None:
    if plan.step is None:
        raise ValueError(f"the plan was made for a module that can be captured as a whole. {error}") from error
    planned, there = set(plan.step.plans), {name for name, _ in submodules(module)}
    if absent := sorted(name for name in planned if name.partition("[")[0] not in there):
        raise ValueError(f"the plan is for a module with a part {absent[0]!r}, which {type(module).__name__} has not")
    view = look(sorted(planned))
    calls = view.calls
    for call in calls:
        if call.name in planned:
            check_fit(plan.step.plans[call.name].graph, call.module, call.args, call.kwargs)
    programs = programs_of(calls, plan.step.plans)
    install_regions(module, programs, plan)
    reshard_as_planned(units_in(view), plan.step.surroundings.gathering)


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """A module taken apart, with the arguments of a step.

    What may run apart are operations and graphs of parts that overwrite in activations, with these as operations of
    their own. For what was measured of plain steps see `StepPlan`, for what is left `Regions`.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keys: tuple[str, ...]
    graphs: dict[str, Graph]
    traced: dict[str, TracedModule]
    reasons: tuple[str, ...]
    units: tuple[nn.Module, ...]
    apart: dict[str, tuple[TracedModule, Graph]] = field(default_factory=dict[str, tuple[TracedModule, Graph]])
    plain_correction_bytes: int | None = None
    beside_seconds: float = 0.0
    left: frozenset[CapturedGraph] = frozenset()

    def with_apart(self, look: Callable[[Sequence[Any] | None], View]) -> _Parts:
        """The same, knowing what may run out of place."""
        return replace(self, apart=profiled_out_of_place(look(list(self.graphs)).calls, self.traced))

    def plain_peak(self, around: Surroundings) -> int:
        """The peak of the step without a plan."""
        if self.plain_correction_bytes is not None:
            around = replace(around, correction_bytes=self.plain_correction_bytes)
        return plain_timeline(self.keys, self.graphs, around).peak_bytes

    def measured(self, around: Surroundings) -> _Parts:
        """The same, knowing what steps of the module, not rewritten yet, need beyond predictions, if they fit."""
        predicted = self.plain_peak(around)
        peak = plain_step_peak(self.module, self.args, self.kwargs, predicted)
        if peak is None:
            return self
        graphs = [self.graphs[key] for key in self.keys]
        seconds = sum(simulate(graph, keep_everything(graph)).seconds for graph in graphs)
        count = sum(len(graph.nodes) for graph in graphs)
        beside = beside_operations(self.module, self.args, self.kwargs, seconds, count)
        return replace(self, plain_correction_bytes=peak - predicted, beside_seconds=beside)

    def plan(self, budget_bytes: int, planner: str | Callable[..., Schedule], around: Surroundings) -> StepPlan:
        """A plan for each part, such that the whole step stays within the budget."""
        apart = {name: graph for name, (_, graph) in self.apart.items()}
        step = plan_step(self.keys, self.graphs, budget_bytes, planner, around, apart=apart)
        return replace(step, plain_correction_bytes=self.plain_correction_bytes, beside_seconds=self.beside_seconds)

    def install(self, step: StepPlan, plan: Plan, planner: str | Callable[..., Schedule]) -> None:
        ways = {name: [traced, *self.apart.get(name, ())[:1]] for name, traced in self.traced.items()}
        programs = {name: checked_program(ways[name], part) for name, part in step.plans.items()}
        install_regions(self.module, programs, plan, planner, self.left)
        reshard_as_planned(self.units, step.surroundings.gathering)


def _fitted(
    parts: _Parts, around: Surroundings, budget_of: Callable[[int], int], planner: str | Callable[..., Schedule]
) -> Plan:
    """The plan by which a measured step stays within the budget, installed.

    What the code between the regions needs beyond what it saves (temporaries, a loss) shows in a measured step alone:
    the prediction is corrected by it, and the regions are planned again where that exceeds the budget or leaves room.
    """
    start = time.perf_counter()
    name, _ = planner_of(planner)

    def least(plain_peak_bytes: int) -> int:
        """The budget of the rank that has the least, of a module that lies on several."""
        return min(all_ranks(parts.module, budget_of(plain_peak_bytes)))

    def run() -> int:
        return retried(lambda: step_peak(parts.module, parts.args, parts.kwargs))

    good: Plan | None = None
    for number in range(_MOST_STEPS):
        budget = least(parts.plain_peak(around))
        is_last = good is None and number == _MOST_STEPS - 1
        infeasible: InfeasibleBudgetError | None = None
        try:
            step = first_rank(parts.module, partial(parts.plan, 1 if is_last else budget, planner, around))
        except InfeasibleBudgetError as error:
            if good is not None:
                break
            # What the lowest peak is, a measured step has yet to tell.
            infeasible = error
            step = first_rank(parts.module, partial(parts.plan, error.sufficient_bytes, planner, around))
        parts.install(step, step.as_plan(name), planner)
        measured = max(all_ranks(parts.module, together(parts.module, run)))
        excess = measured - step.predicted_peak_bytes
        around = around.corrected(excess)
        step = step.corrected(excess)
        budget = least(step.plain_peak_bytes)
        step = replace(step, budget_bytes=budget)
        if measured <= budget:
            is_improved = good is not None
            good = replace(
                step.as_plan(name, time.perf_counter() - start),
                rung="regions",
                reasons=parts.reasons,
            )
            if is_improved or not step.num_recomputed or -excess < WORTH_ANOTHER * measured:
                break
        elif infeasible is not None:
            raise infeasible_as_run(infeasible, measured, budget, step.plain_peak_bytes)
    assert good is not None, "a planner that meets a budget of one byte"
    assert good.step is not None
    parts.install(good.step, good, planner)
    return good
