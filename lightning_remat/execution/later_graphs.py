"""Programs of graphs that TorchDynamo captures while a module trains: by a known plan, or by one of their own."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import product
from operator import gt, le
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..budget import format_bytes
from ..capture.dynamo import CapturedGraph, CompiledForward
from ..capture.tracer import is_alike, traced_graph
from ..errors import ScheduleError, TraceError
from ..lowering import keep_everything
from ..measure.out_of_memory import is_out_of_memory
from ..module_state.ambient import Ambient
from ..module_state.nesting import tensors_in
from ..operations.operation import TracedModule
from ..plans.plan import Plan
from ..plans.region_options import Asking, Option, options_of, owning_nothing
from ..plans.step_memory import RegionPeaks
from ..profiling.profiler import profile_call
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from .assembly import compile_schedule
from .program import Program

logger = logging.getLogger("lightning_remat")

Part = tuple[Program, Plan]
"""How a graph runs, and the plan that says so."""

_MOST_PLANS = 8
"""Graphs in which something must be recomputed that are planned while a module trains; further ones run plain."""

_NOTICEABLY = 1.02
"""Times what was planned for, above which a user is told."""


@dataclass(slots=True, eq=False)
class Newcomer:
    """A graph that was captured later and has other operations than the known ones.

    Attributes:
        places: The known graphs in whose place it is: none where it has no parameters, and then it may be anywhere.
        limits: What may be needed, and held, there.
        sizes: Those that may change from call to call, as large as they were.
        held_bytes: What it holds.
        is_lean: Whether it holds as little as it can.
    """

    places: frozenset[int]
    limits: RegionPeaks
    sizes: list[int]
    held_bytes: int = 0
    is_lean: bool = False


@dataclass(slots=True, eq=False)
class Call:
    """A call of a rewritten module.

    Attributes:
        forward: Its forward, as it is captured.
        module: What is called.
        args: Positional arguments.
        kwargs: Keyword arguments.
        newcomers: How often graphs with demands of their own have run in it in the places of known ones.
        is_planned: Whether one of them was planned in it, of which earlier ones knew nothing.
    """

    forward: CompiledForward
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    newcomers: Counter[Newcomer] = field(default_factory=Counter[Newcomer])
    is_planned: bool = False


@dataclass(frozen=True, slots=True)
class _Demand:
    """What the memory of a graph of known operations depends on.

    Attributes:
        kinds: Types of the tensors that come in, whether they ask for gradients, autocast, the numbers in its calls.
        sizes: Elements of these tensors.
    """

    kinds: tuple[Any, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, graph: CapturedGraph, values: list[Any]) -> _Demand:
        # In what order they come in differs from graph to graph.
        tensors = sorted(tensors_in(values), key=lambda t: (str(t.dtype), t.requires_grad, t.numel()))
        autocast = Ambient.current({"cpu", *(t.device.type for t in tensors)} - {"meta"}).autocast
        numbers = [a for n in graph.graph.nodes for a in (*n.args, *n.kwargs.values()) if isinstance(a, float)]
        kinds = (*((t.dtype, t.requires_grad) for t in tensors), *sorted(autocast), *numbers)
        return cls(kinds, tuple(t.numel() for t in tensors))


class LaterGraphs:
    """Makes programs for graphs that are captured after a module was planned.

    Args:
        parts: The programs of the graphs that the plan is for, and their plans.
        planner: What makes further plans.
        headroom_bytes: What the step by these plans leaves of its budget.

    Attributes:
        parameters: Of each graph that has run, by their names in the module.
        newcomers: Those that none of the plans serves.
        num_profiled: How many were profiled when they first ran, which took memory.
    """

    def __init__(self, parts: Sequence[Part], planner: str | Callable[..., Schedule], headroom_bytes: int) -> None:
        self.parts, self.planner, self.headroom_bytes = parts, planner, headroom_bytes
        self.parameters: dict[CapturedGraph, frozenset[str]] = {}
        self._demands: dict[CapturedGraph, _Demand] = {}
        self.newcomers: dict[CapturedGraph, Newcomer] = {}
        self._num_plans = self.num_profiled = 0
        self._has_warned = self._has_warned_of_more = False

    def note(self, module: nn.Module, graph: CapturedGraph, values: list[Any]) -> None:
        """A graph of the module runs for the first time."""
        read = {id(v) for v in values}
        self.parameters[graph] = frozenset(name for name, p in module.named_parameters() if id(p) in read)
        self._demands[graph] = _Demand.of(graph, values)

    def is_outgrown(self, call: Call, graph: CapturedGraph, values: list[Any]) -> bool:
        """Whether a graph that was looked at before runs on something larger now, or too often in one call."""
        newcomer = self.newcomers.get(graph)
        if newcomer is None:
            return False
        return any(map(gt, _sizes_in(values), newcomer.sizes)) or self._has_no_room(call, newcomer)

    def runs(self, call: Call, graph: CapturedGraph) -> None:
        """A graph runs: what newcomers hold in the place of a known one is summed up, and told where it is too much."""
        newcomer = self.newcomers.get(graph)
        if newcomer is None or not newcomer.places:
            return
        call.newcomers[newcomer] += 1
        held, most = self._beside(call, newcomer), newcomer.limits.held_bytes
        if held > _NOTICEABLY * most and not (call.is_planned or self._has_warned_of_more):
            self._has_warned_of_more = True
            warnings.warn(
                f"{type(call.module).__name__} does something new and may need more than its budget: "
                f"{format_bytes(held)} are held for its backward and {format_bytes(most)} were planned for. Remedy: "
                "plan it anew, on a batch with which it does so",
                stacklevel=2,
            )

    def program_for(self, call: Call, graph: CapturedGraph, values: list[Any]) -> Program | None:
        """The program of a graph that was captured later: by the same plan where it has the same operations.

        None where it runs as it is, as one does of which nothing is differentiated, or by the program that it has had
        for something smaller.
        """
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors_in(values)):
            return None
        if (newcomer := self.newcomers.get(graph)) is not None:
            newcomer.sizes = [*map(max, newcomer.sizes, _sizes_in(values))]
            newcomer.is_lean |= self._has_no_room(call, newcomer)
        forward, module, call.is_planned = call.forward, call.module, True
        name, given = type(module).__name__, self._given(call, values)
        try:
            traced = traced_graph(module, forward, graph, values, given)
            apart = traced_graph(module, forward, graph, values, given, is_out_of_place=True)
            places = self._places(graph)
            limits = self._limits(places)
            costs_of = cache(partial(self._costs, places, values, given))  # once, however many parts are like it
            for (program, plan), found in product(self.parts, (traced, apart)):
                if found is not None and is_alike(found, program.traced):
                    if self._needs_no_more(graph, cast(CapturedGraph, program.traced.captured)):
                        return compile_schedule(found, plan.schedule, plan.graph)
                    costs = costs_of(found)
                    if costs is None or _keeps_within(Asking(costs, self.planner), plan.schedule, limits):
                        return compile_schedule(found, plan.schedule, costs or plan.graph)
            assert traced is not None
            if not traced.operations:
                return None
            newcomer = newcomer or Newcomer(places, limits, _sizes_in(values))
            self.newcomers[graph] = newcomer
            return self._planned(call, newcomer, traced, costs_of(traced))
        except ValueError as error:  # what a planner of the user's proposes too
            if not self._has_warned:
                warnings.warn(
                    f"{name} runs without rematerialization where it does something new: {error}", stacklevel=2
                )
            self._has_warned = True
            return None

    def _planned(self, call: Call, newcomer: Newcomer, traced: TracedModule, costs: Graph | None) -> Program | None:
        """The program of a newcomer by a plan of its own; None where it fits as it is, or no plan makes it leaner.

        Raises:
            TraceError: It can be planned no more.
        """
        if costs is None:
            raise TraceError("there is no memory to find out what it needs")
        asking = Asking(costs, self.planner)
        plain = asking.option(keep_everything(costs))
        newcomer.held_bytes = plain.peaks.held_bytes
        left = _more(newcomer.limits, -self._beside(call, newcomer))
        if newcomer.is_lean:
            left = replace(left, held_bytes=0)
        if _is_within(plain.peaks, left):
            return None
        if self._num_plans == _MOST_PLANS:
            raise TraceError(
                f"{_MOST_PLANS} plans have been made for it. Remedy: keep what changes from step to step out of "
                "its forward"
            )
        planned = _asked(asking, left)
        if planned.schedule == plain.schedule:
            return None
        self._num_plans += 1
        newcomer.held_bytes = planned.peaks.held_bytes
        name = type(call.module).__name__
        logger.info("%s does something new and is planned anew: %s", name, format_bytes(planned.peaks.most_bytes))
        return compile_schedule(traced, planned.schedule, costs)

    def _costs(
        self, places: frozenset[int], values: list[Any], given: list[Tensor], traced: TracedModule
    ) -> Graph | None:
        """The profile of a graph in the places of known ones; None where there is no memory for that."""
        self.num_profiled += 1
        try:
            # In the midst of a step, whose budget holds meanwhile.
            made = owning_nothing(profile_call(traced, values, given, repeats=1, together_bytes=0))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        known = [self.parts[k][1].graph for k in places]
        return made.asked_as(known[0]) if len(known) == 1 else made

    def _needs_no_more(self, graph: CapturedGraph, known: CapturedGraph) -> bool:
        """Whether a graph of the same operations works on no more than a known one that has run.

        If none has, what runs first since the plan was made is what was planned, though it was captured once more.
        """
        own, other = self._demands[graph], self._demands.get(known)
        return other is None or (own.kinds == other.kinds and all(map(le, own.sizes, other.sizes)))

    def _limits(self, places: frozenset[int]) -> RegionPeaks:
        """What a graph may need, and hold, in the places of known ones, so that the step stays within its budget.

        Others may do something new as well, and have their share of what is left. One without parameters may need as
        much as any.
        """
        peaks = [self._peaks[k] for k in places or range(len(self.parts))]
        held = [p.held_bytes for p in peaks]
        most = RegionPeaks(max(p.forward_bytes for p in peaks), max(p.backward_bytes for p in peaks), max(held))
        others = sum(held) - max(held) if places else 0
        return _more(most, others + self.headroom_bytes // len(self.parts))

    def _places(self, graph: CapturedGraph) -> frozenset[int]:
        """The known graphs in whose place a graph is: those with which it shares most parameters."""
        shared = [len(self.parameters[graph] & self._parameters_of(program)) for program, _ in self.parts]
        return frozenset(k for k, n in enumerate(shared) if n and n == max(shared))

    @cached_property
    def _peaks(self) -> list[RegionPeaks]:
        """Of the known graphs, by their plans."""
        plans = [plan for _, plan in self.parts]
        return [Asking(owning_nothing(p.graph), self.planner).option(p.schedule).peaks for p in plans]

    def _beside(self, call: Call, newcomer: Newcomer) -> int:
        """Bytes by which what newcomers hold in a call is more than was planned for in other places than this one's."""
        if not newcomer.places:
            return 0
        places = frozenset[int]().union(*(n.places for n in call.newcomers)) - newcomer.places
        held = sum(n.held_bytes * times for n, times in call.newcomers.items())
        return max(0, held - sum(self._peaks[k].held_bytes for k in places))

    def _has_no_room(self, call: Call, newcomer: Newcomer) -> bool:
        """Whether it has run in a call before, and once more is too much: where a known graph is divided in a loop."""
        if newcomer.is_lean or newcomer not in call.newcomers:
            return False
        return self._beside(call, newcomer) + newcomer.held_bytes > newcomer.limits.held_bytes

    def _parameters_of(self, program: Program) -> frozenset[str]:
        traced = program.traced
        return frozenset(traced.owned.values()) | self.parameters.get(cast(CapturedGraph, traced.captured), frozenset())

    def _given(self, call: Call, values: list[Any]) -> list[Tensor]:
        """The tensors that come into a graph: the call's, or any that the module does not hold."""
        if call.forward.is_whole:
            return tensors_in((call.args, call.kwargs))
        owned = {id(t) for t in (*call.module.parameters(), *call.module.buffers())}
        return [v for v in values if isinstance(v, Tensor) and id(v) not in owned]


def _keeps_within(asking: Asking, schedule: Schedule, limits: RegionPeaks) -> bool:
    """Whether a schedule for the same operations does; not where their backwards read what it has discarded."""
    try:
        return _is_within(asking.option(schedule).peaks, limits)
    except ScheduleError:
        return False


def _is_within(peaks: RegionPeaks, limits: RegionPeaks) -> bool:
    return all(map(le, astuple(peaks), astuple(limits)))


def _more(peaks: RegionPeaks, num_bytes: int) -> RegionPeaks:
    """So many bytes more, or less, but none below zero."""
    return RegionPeaks(*(max(0, most + num_bytes) for most in astuple(peaks)))


def _asked(asking: Asking, limits: RegionPeaks) -> Option:
    """A schedule within the limits, or the closest one that the planner has; it knows one limit for both directions."""
    for most in (limits.most_bytes, min(limits.forward_bytes, limits.backward_bytes)):
        found = asking.answer(most, max(0, most - limits.held_bytes))
        if found is not None and _is_within(found.peaks, limits):
            return found

    def excess(option: Option) -> int:
        return sum(max(0, own - most) for own, most in zip(astuple(option.peaks), astuple(limits), strict=True))

    return min(options_of(asking), key=excess)


def _sizes_in(values: list[Any]) -> list[int]:
    """The sizes that may change from call to call, of which TorchDynamo makes inputs."""
    return [value for value in values if type(value) is int]


def is_worth(plan: Plan) -> bool:
    """Whether a step by the plan differs from the plain one."""
    return bool(plan.num_recomputed) or plan.peak_bytes < plan.plain.peak_bytes
