"""Programs of graphs that TorchDynamo captures while a module trains: by a known plan, or by one of their own."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from operator import gt
from typing import Any

from torch import Tensor, nn

from ..budget import format_bytes
from ..capture.dynamo import CapturedGraph, CompiledForward
from ..capture.tracer import is_alike, traced_graph
from ..errors import InfeasibleBudgetError, TraceError
from ..lowering import keep_everything
from ..module_state.nesting import tensors_in
from ..plans.plan import Plan
from ..plans.planner import plan as make_plan
from ..profiling.profiler import profile_call
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ..schedules.simulator import simulate
from .program import Program, compile_schedule

logger = logging.getLogger("lightning_remat")

Part = tuple[Program, Plan]
"""How a graph runs, and the plan that says so."""

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

_MOST_PLANS = 8
"""Graphs in which something must be recomputed that are planned while a module trains; further ones run plain."""


class LaterGraphs:
    """Makes programs for graphs that are captured after a module was planned.

    Args:
        parts: The programs of the graphs that the plan is for, and their plans.
        planner: What makes further plans.
        headroom_bytes: What the step by these plans leaves of its budget.
    """

    def __init__(self, parts: Sequence[Part], planner: str | Callable[..., Schedule], headroom_bytes: int) -> None:
        self.parts, self.planner, self.headroom_bytes = parts, planner, headroom_bytes
        self._sizes: dict[CapturedGraph, list[int]] = {}  # of those with plans of their own
        self._num_plans = 0
        self._has_warned = False

    def is_outgrown(self, graph: CapturedGraph, values: list[Any]) -> bool:
        """Whether a graph that was looked at before runs on something larger now."""
        sizes = self._sizes.get(graph)
        return sizes is not None and any(map(gt, _sizes_in(values), sizes))

    def program_for(self, call: Call, graph: CapturedGraph, values: list[Any]) -> Program | None:
        """The program of a graph that was captured later: by the same plan where it has the same operations."""
        module = call[0]
        forward: CompiledForward = self.parts[0][0].traced.forward
        name, given = type(module).__name__, self._given(call, values)
        try:
            traced = traced_graph(module, forward, graph, values, given)
            apart = traced_graph(module, forward, graph, values, given, is_out_of_place=True)
            for (program, plan), found in product(self.parts, (traced, apart)):
                if found is not None and is_alike(found, program.traced):
                    return compile_schedule(found, plan.schedule, plan.graph)
            assert traced is not None
            self._sizes[graph] = _sizes_in(values)
            costs = profile_call(traced, values, given, repeats=1)
            budget_bytes = self._allowed_bytes()
            if simulate(costs, keep_everything(costs)).peak_bytes <= budget_bytes:
                return None
            if self._num_plans == _MOST_PLANS:
                raise TraceError(
                    f"{_MOST_PLANS} plans have been made for it. Remedy: keep what changes from step to step out of "
                    "its forward"
                )
            self._num_plans += 1
            plan = self._planned(costs, budget_bytes)
            logger.info("%s does something new and is planned anew: %s", name, format_bytes(plan.peak_bytes))
            return compile_schedule(traced, plan.schedule, plan.graph) if is_worth(plan) else None
        except ValueError as error:  # what a planner of the user's proposes too
            if not self._has_warned:
                warnings.warn(
                    f"{name} runs without rematerialization where it does something new: {error}", stacklevel=2
                )
            self._has_warned = True
            return None

    def _allowed_bytes(self) -> int:
        """What a graph may need in the place of one of the known ones, so that the step stays within its budget.

        Nothing is run to measure it: its prediction is taken to be off by the same factor as theirs.
        """
        known = [(plan.peak_bytes, plan.peak_bytes - plan.correction_bytes) for _, plan in self.parts]
        return max((peak + self.headroom_bytes) * predicted // max(1, peak) for peak, predicted in known)

    def _planned(self, costs: Graph, expected_bytes: int) -> Plan:
        """A plan for a graph that is expected to have so much; the lowest one where that is a little too strict.

        Raises:
            InfeasibleBudgetError: Even that exceeds what the first graphs had.
        """
        try:
            return make_plan(costs, expected_bytes, self.planner)
        except InfeasibleBudgetError as error:
            if error.minimum_bytes > max(plan.budget_bytes for _, plan in self.parts):
                raise
            return make_plan(costs, error.sufficient_bytes, self.planner)

    def _given(self, call: Call, values: list[Any]) -> list[Tensor]:
        """The tensors that come into a graph: the call's, or any that the module does not hold."""
        if self.parts[0][0].traced.forward.is_whole:
            return tensors_in(call[1:])
        owned = {id(t) for t in (*call[0].parameters(), *call[0].buffers())}
        return [v for v in values if isinstance(v, Tensor) and id(v) not in owned]


def _sizes_in(values: list[Any]) -> list[int]:
    """The sizes that may change from call to call, of which TorchDynamo makes inputs."""
    return [value for value in values if type(value) is int]


def is_worth(plan: Plan) -> bool:
    """Whether a step by the plan differs from the plain one."""
    return bool(plan.num_recomputed) or plan.peak_bytes < plan.plain.peak_bytes
