"""A training step that can be tried at any batch size, and the memory model made from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from ..errors import MismatchError, TraceError
from ..execution.rewriter import install_parts, restore
from ..plans.plan import StepPlan, plain_timeline
from ..plans.step_memory import Surroundings, Timeline
from ..plans.step_planner import plan_step
from ..regions.calls import View
from ..regions.fit import misfit
from ..regions.gathering import reshard_as_planned, units_in
from ..regions.search import find_regions, profiled_out_of_place, programs_of
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from .scaling import Line, ScalableGraph, extrapolated, scaled_surroundings

T = TypeVar("T")
Profile = ScalableGraph | Graph
logger = logging.getLogger(__name__)

ELSEWHERE = "the plan is for something else than what the step calls on another device"

STEPS_PER_TRIAL = 2
"""The second step is the first in which optimizer state and gradients are alive in the forward."""


class Trial(Protocol):
    """A training step that leaves no trace.

    Attributes:
        device: Where it runs.
        module: What is trained.
        batch_size: Samples in the batch as the loader yields it.
        num_devices: Devices that train side by side.
        most_samples: The largest batch that the data can fill; None if unknown.
        within: With how many bytes what is measured has to get by, as far as the system can be told so; None for all.
    """

    device: torch.device
    module: nn.Module
    batch_size: int
    num_devices: int
    most_samples: int | None
    within: int | None

    def look_through(self, batch_size: int, modules: Sequence[Any] | None = None) -> View:
        """The calls of the modules (None: of those that the user named, or that the step calls) at that batch size."""
        ...

    def surroundings(self, view: View, batch_size: int) -> Surroundings:
        """What is alive beside the regions."""
        ...

    def measure(self, batch_size: int, *, with_scratch: bool) -> int:
        """The measured peak of `STEPS_PER_TRIAL` real steps with backward and optimizer, in bytes.

        With scratch, all counts that the device must have for them (`meter.measure_peak`). Where a backward finds what
        was changed since its forward they are run again (`modified.retried`).
        """
        ...

    def alive_bytes(self) -> int:
        """Bytes on the device before the search, which count in the budget and are not free."""
        ...

    def leaves_one_sample(self, batch_size: int) -> bool:
        """Whether an epoch of such batches ends with a single sample, which a batch norm cannot be trained on."""
        ...

    def share(self, compute: Callable[[], T]) -> T:
        """What `compute` returns on rank 0, on every rank; its error likewise.

        So is shared whatever decides if something is shared next: seconds and scratch differ between ranks.
        """
        ...

    def least(self, value: int) -> int:
        """The least of the ranks' values."""
        ...


@dataclass(frozen=True, slots=True)
class StepModel:
    """Bytes and seconds of the step at any batch size (exactly one, where it was profiled once).

    Attributes:
        keys: The regions' names in the order of their calls.
        sizes: The one or two sizes that were profiled.
        graphs: Region name → its profile, or profiles at two sizes.
        around: What is alive beside the regions at the one or two sizes.
        excess: What measured steps needed beyond the profile's prediction, batch size → bytes, the last one last.
        apart: Regions that may run out of place, where a plan needs that; None until they are asked for.
        reasons: Why parts of the step are no regions, a sentence each.
    """

    keys: tuple[str, ...]
    sizes: tuple[int, ...]
    graphs: dict[str, Profile]
    around: tuple[Surroundings, ...]
    excess: dict[int, int] = field(default_factory=dict[int, int])
    apart: dict[str, Profile] | None = None
    reasons: tuple[str, ...] = ()

    @property
    def line(self) -> Line | None:
        """The two profiled sizes; None where there is one."""
        return Line(*self.sizes) if len(self.sizes) > 1 else None

    def graphs_at(self, size: int) -> dict[str, Graph]:
        """The regions' operations as they run without a plan."""
        return _at(self.graphs, size)

    def apart_at(self, size: int) -> dict[str, Graph]:
        """Those of the regions that may run out of place."""
        return _at(self.apart or {}, size)

    def plain_timeline(self, size: int) -> Timeline:
        """The step without recomputation."""
        return plain_timeline(self.keys, self.graphs_at(size), self.surroundings_at(size))

    def plan(self, size: int, budget_bytes: int, planner: str | Callable[..., Schedule]) -> StepPlan:
        """A plan by which the step of a batch size stays within the budget.

        Raises:
            InfeasibleBudgetError: None does.
        """
        around, graphs, apart = self.surroundings_at(size), self.graphs_at(size), self.apart_at(size)
        like: dict[Graph, Graph] = {}
        if self.line is not None:
            for own, at_large in ((graphs, self.graphs_at), (apart, self.apart_at)):
                like |= {own[name]: graph for name, graph in at_large(self.line.large).items()}
        return plan_step(self.keys, graphs, budget_bytes, planner, around, apart=apart, like=like)

    def surroundings_at(self, size: int) -> Surroundings:
        """What is alive beside the regions, as corrected."""
        around = self.around[0]
        if self.line is not None:
            around = scaled_surroundings(self.line, around, self.around[1], size)
        return replace(around, correction_bytes=extrapolated(tuple(self.excess.items()), size))

    def corrected(self, excess_bytes: int, size: int) -> StepModel:
        """The model after a step of batch size `size` needed `excess_bytes` more than predicted."""
        total = self.surroundings_at(size).correction_bytes + excess_bytes
        earlier = {s: e for s, e in self.excess.items() if s != size}
        return replace(self, excess={**earlier, size: total})


def model_step(trial: Trial, sizes: Sequence[int], *, with_scratch: bool) -> StepModel:
    """Profiles the step at one batch size (exact there), or at two (linear in between and beyond).

    Raises:
        TraceError: Nothing that the step calls can be captured.
    """
    profiles: list[dict[str, Graph]] = []
    around: list[Surroundings] = []
    keys: list[tuple[str, ...]] = []
    reasons: dict[str, None] = {}
    for size in sizes:  # one at a time: a call holds its batch
        regions = find_regions(partial(trial.look_through, size), None)
        if not regions.traced:
            raise TraceError(f"nothing that the training step calls can be rematerialized:{regions.tried}")
        for reason in regions.reasons:
            logger.info("%s", reason)
        reasons |= dict.fromkeys(regions.reasons)
        keys.append(tuple(call.name for call in regions.view.calls))
        profiles.append(regions.profiled(with_scratch=with_scratch))
        around.append(trial.surroundings(regions.view, size))
    if (keys[0], around[0].order, around[0].over) != (keys[-1], around[-1].order, around[-1].over):
        raise ValueError(
            f"the training step calls {keys[0]} at batch size {sizes[0]} and {keys[1]} at {sizes[1]}, or makes its "
            "backwards in another order: give a fixed batch_size"
        )
    return StepModel(keys[0], tuple(sizes), _joined(sizes, profiles), tuple(around), reasons=tuple(reasons))


def with_apart(trial: Trial, model: StepModel, *, with_scratch: bool) -> StepModel:
    """The model, knowing which regions may run out of place."""
    if model.apart is not None:
        return model

    def at(size: int) -> dict[str, Graph]:
        calls = trial.look_through(size, list(model.graphs)).calls
        found = profiled_out_of_place(calls, {}, with_scratch=with_scratch)
        return {name: graph for name, (_, graph) in found.items()}

    return replace(model, apart=_joined(model.sizes, [at(size) for size in model.sizes]))


def _joined(sizes: Sequence[int], profiles: Sequence[dict[str, Graph]]) -> dict[str, Profile]:
    if len(sizes) == 1:
        return {**profiles[0]}
    return {key: ScalableGraph(Line(*sizes), profiles[0][key], profiles[1][key]) for key in profiles[0]}


def _at(profiles: dict[str, Profile], size: int) -> dict[str, Graph]:
    return {k: p.at(size) if isinstance(p, ScalableGraph) else p for k, p in profiles.items()}


def install(trial: Trial, batch_size: int, step: StepPlan, planner: str | Callable[..., Schedule]) -> list[nn.Module]:
    """Rewrites every region by its plan, on an error none; a batch is held only meanwhile.

    Args:
        trial: The step.
        batch_size: For which it was planned.
        step: The plan.
        planner: Makes further plans, for graphs that are captured later.

    Returns:
        The rewritten modules.

    Raises:
        MismatchError: The plan is for something else than what the step calls.
    """
    view = trial.look_through(batch_size, list(step.plans))
    programs = programs_of(view.calls, step.plans)
    rewritten = install_parts(programs, step.plans, planner, headroom_bytes=step.headroom_bytes, is_in_step=True)
    return [*rewritten, *reshard_as_planned(units_in(view), step.surroundings.gathering)]


def install_together(
    trial: Trial, batch_size: int, step: StepPlan, planner: str | Callable[..., Schedule]
) -> list[nn.Module]:
    """`install` on every device, or on none.

    Raises:
        MismatchError: The plan is for something else than what the step calls, here or on another device.
    """
    modules, own = list[nn.Module](), None
    try:
        modules = install(trial, batch_size, step, planner)
    except MismatchError as error:
        own = error
    if trial.least(int(own is None)):
        return modules
    uninstall(modules)
    raise own or MismatchError(ELSEWHERE)


def misfit_of(step: StepPlan, trial: Trial, batch_size: int) -> str | None:
    """Why a stored plan does not fit what the step calls at a batch size; None if it does."""
    try:
        calls = trial.look_through(batch_size, list(step.plans)).calls
    except ValueError as error:  # it does not call them
        return str(error)
    if missing := [name for name in step.plans if all(c.name != name for c in calls)]:
        return f"the plan is for {', '.join(missing)}, which the step does not call"
    found = (misfit(step.plans[c.name].graph, c.module, c.args, c.kwargs) for c in calls if c.name in step.plans)
    return next((reason for reason in found if reason is not None), None)


def uninstall(modules: Iterable[nn.Module]) -> None:
    """Undoes `install`."""
    for module in modules:
        restore(module)
