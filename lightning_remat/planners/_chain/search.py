"""A chain planner on a graph: its sequences over all memories, judged by the simulator at the true peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...schedules.arrays import decode, graph_arrays
from ...schedules.compiled import Small
from ...schedules.compiled_simulator import Cost, Judge
from ...schedules.graph import Graph
from ...schedules.schedule import Schedule
from .._candidates import Candidate, fastest_that_fits, infeasible, trade_off
from .problem import Problem, StageCosts, assemble, keep_all_memory
from .recurrence import least_memory, whole_row
from .solver import Table, front_table, keep_all_sequence, slot_table, steps_at
from .stage_lowering import StageArrays, lower_steps, stage_arrays
from .stages import GraphStage, StageFigures, cut_stages, stage_figures
from .steps import Steps, to_steps

# Up to so many states the makespans are step functions of exact memory, of at most so many steps.
_MOST_EXACT_ROWS = 3000
_MOST_STEPS = 400
# So many makespans of a table are memory that a laptop has.
_MOST_CELLS = 150_000_000

# Sequences judged whatever the budget: the first ones, and so many spread over all.
_NUM_FIRST, _NUM_SPREAD = 8, 14
# Sequences judged beyond the boundary that bisection finds, and about the lowest peak.
_NUM_BEYOND = 10


class SubFamily(NamedTuple):
    """Sequences of one dynamic program: whether tapes are kept for later, and whether activations may float."""

    keeps_tapes: bool
    floating: bool


def plan_stages(
    graph: Graph,
    budget_bytes: int,
    *,
    families: tuple[SubFamily, ...],
    floor_families: tuple[SubFamily, ...] = (),
    slots: int,
    planner: str,
) -> Schedule:
    """The fastest schedule that fits the budget among some families' optimal sequences for every memory.

    The dynamic program knows the stages' own memory by the simulator's rules, not what their schedules save when
    they are written out. So the memory that it plans for is searched: each of its optimal sequences is a candidate, and
    the simulated peak decides.

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.
        families: The sequences to choose from.
        floor_families: More of them, tried where none of those fits.
        slots: Slots of memory for long chains.
        planner: Their name, for the error.

    Returns:
        A schedule whose simulated peak is within the budget.

    Raises:
        InfeasibleBudgetError: No candidate fits; carries the lowest peak among them and the node that sets it.
        ValueError: `slots` is not positive.
    """
    if slots < 1:
        raise ValueError(f"slots is {slots}: pass a positive number")
    if not graph.nodes:
        return fastest_that_fits(graph, budget_bytes, trade_off(graph, [Schedule(())]), planner=planner)
    lowest: list[tuple[int, _Optima, int]] = []
    for group in (families, floor_families):
        answers: list[tuple[float, int, _Optima, int]] = []
        for family in group:
            optima = _optima(graph, family, slots)
            for index in _near(optima, budget_bytes):
                peak_bytes, seconds = optima.cost(index)
                lowest.append((peak_bytes, optima, index))
                if peak_bytes <= budget_bytes:
                    answers.append((seconds, peak_bytes, optima, index))
        if answers:
            _, _, optima, index = min(answers, key=lambda answer: answer[:2])
            return optima.schedule(index)
    _, optima, index = min(lowest, key=lambda one: one[0])
    raise infeasible(graph, budget_bytes, optima.schedule(index), planner=planner)


def stage_candidates(graph: Graph, family: SubFamily, slots: int) -> Iterator[Candidate]:
    """What `plan_stages` chooses from: of a family's optimal sequences for every memory those that none beats."""
    optima = _optima(graph, family, slots)
    lowest = float("inf")
    for index in sorted(range(optima.last + 1), key=lambda index: (optima.cost(index).seconds, optima.cost(index))):
        cost = optima.cost(index)
        if cost.peak_bytes < lowest:
            lowest = cost.peak_bytes
            yield Candidate(*cost, optima.schedule(index))


@dataclass(frozen=True, slots=True)
class _Optima:
    """A family's optimal sequences on a graph, by rising memory; the last one is that of ample memory.

    Attributes:
        stages: Of the graph.
        steps: The sequences.
        judge: Of the graph.
        costs: Those of the sequences that were asked for.
    """

    stages: StageArrays
    steps: tuple[Steps, ...]
    judge: Judge
    costs: dict[int, Cost] = field(default_factory=dict[int, Cost])

    @property
    def last(self) -> int:
        """Index of the last sequence."""
        return len(self.steps) - 1

    def schedule(self, index: int) -> Schedule:
        """A sequence as a schedule."""
        return decode(self.judge.graph, self._lowered(index))

    def cost(self, index: int) -> Cost:
        """Simulated peak and seconds of a sequence."""
        if index not in self.costs:
            self.costs[index] = self.judge.cost_of(self._lowered(index))
        return self.costs[index]

    def _lowered(self, index: int) -> Small:
        return lower_steps(graph_arrays(self.judge.graph), self.stages, self.steps[index])


@lru_cache(maxsize=8)
def _optima(graph: Graph, family: SubFamily, slots: int) -> _Optima:
    stages, figures = _stages(graph)
    problem = stage_problem(graph, stages, figures, family)
    table, memories = makespans_by_memory(problem, slots)
    steps = (*steps_at(problem, table, memories), to_steps(keep_all_sequence(problem)))
    return _Optima(stage_arrays(stages), steps, Judge(graph))


@lru_cache(maxsize=4)
def _stages(graph: Graph) -> tuple[tuple[GraphStage, ...], tuple[StageFigures, ...]]:
    stages = cut_stages(graph)
    return stages, tuple(stage_figures(graph, stage) for stage in stages)


def _near(optima: _Optima, budget_bytes: int) -> set[int]:
    """The sequences to choose from: about the fastest that fits where one does, else about the lowest peak."""
    last = optima.last

    def peak(index: int) -> int:
        return optima.cost(index).peak_bytes

    # What is judged whatever the budget decides whether there is an answer: so the least budget with one is exact.
    spread = np.linspace(0, last, _NUM_SPREAD).round().astype(int).tolist()
    near = {*range(min(_NUM_FIRST, last + 1)), *spread}
    if all(peak(index) > budget_bytes for index in near):
        lowest = min(sorted(near), key=peak)
        near.update(range(max(0, lowest - _NUM_BEYOND), min(last, lowest + _NUM_BEYOND) + 1))
    fitting = [index for index in near if peak(index) <= budget_bytes]
    if fitting:
        # The peak grows with the memory planned for, if not strictly: bisect, then look a little further.
        low = max(fitting)
        high = min((index for index in near if index > low), default=last + 1)
        while high - low > 1:
            middle = (low + high) // 2
            near.add(middle)
            low, high = (middle, high) if peak(middle) <= budget_bytes else (low, middle)
        near.update(range(low, min(last, low + _NUM_BEYOND) + 1))
    return near


def stage_problem(
    graph: Graph, stages: tuple[GraphStage, ...], figures: tuple[StageFigures, ...], family: SubFamily
) -> Problem:
    n = len(stages)
    stage_of = {m: k for k, stage in enumerate(stages, start=1) for m in stage.nodes}
    # Outputs that the caller holds, and from the first backward on their gradients, last until their own backward.
    outputs, gradients = np.zeros(n + 1, dtype=np.int64), np.zeros(n + 1, dtype=np.int64)
    for root in {graph.roots[i] for i in graph.outputs}:
        outputs[stage_of[root]] += graph.nodes[root].output_bytes
    for i in graph.ends():
        gradients[stage_of[i]] += graph.gradient_bytes(i)
    columns = zip(StageFigures._fields, zip(*figures, strict=True), strict=True)
    of: dict[str, Any] = {
        name.removesuffix("_bytes"): np.array([0, *column], np.float64 if name.endswith("_seconds") else np.int64)
        for name, column in columns
    }
    parameters = of["parameter"]
    done = parameters.sum() - np.cumsum(parameters)
    before = np.cumsum(outputs + gradients) - outputs - gradients
    held = of["held"] = of["gradient"] + done + before + outputs + gradients
    held[n] = np.cumsum(outputs)[n - 1]
    # The last stage's only run is the first, of all its nodes.
    of["leaf_peak"][n] = max(of["fall_peak"][n], of["back_peak"][n] + before[n] - held[n])
    of["leaf_seconds"][n] = of["forward_seconds"][n]
    of["back_peak"] = of["back_peak"] + done + before
    costs = StageCosts(**{name: of[name] for name in StageCosts._fields})
    return assemble(costs, **family._asdict())


def makespans_by_memory(problem: Problem, slots: int) -> tuple[Table, list[int]]:
    """The makespans of all states, and the memories, ascending, at which that of the whole chain falls."""
    row = whole_row(problem)
    most = keep_all_memory(problem)
    if problem.num_rows <= _MOST_EXACT_ROWS:
        table = front_table(problem, most, _MOST_STEPS)
        first, end = table.bounds[row].tolist()
        return table, table.memories[first:end].tolist()
    table, _ = slot_table(problem, most, min(slots, max(1, _MOST_CELLS // problem.num_rows)))
    makespans = table.uniform[row]
    falls = (np.flatnonzero(makespans[1:] < makespans[:-1]) + 1).tolist()
    if falls:
        return table, falls
    least = int(least_memory(problem)[row])
    return front_table(problem, least, 1), [least]
