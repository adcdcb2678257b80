"""The answer: what the step needs, how low it goes, what that costs, the batch sizes; planned, and run on fakes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..batch_search.candidates import CandidateSearch, Choice
from ..batch_search.search import first_choice, sizes_to_consider
from ..batch_search.settings import Settings
from ..batch_search.trial import StepModel, install, model_step, uninstall, with_apart
from ..budget import ALL_BYTES
from ..errors import InfeasibleBudgetError
from ..planners import PLANNERS
from ..reports.residency import Contents, contents_at, plain_step, view_step
from ..reports.result import Candidate, Result
from .network import Network
from .request import Request

NUM_POINTS = 8
"""Of the curve of time over memory."""

_MOST_TRIES = 3

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Point:
    """The fastest plan within a budget.

    Attributes:
        peak_bytes: Its peak.
        step_seconds: Forward, backward and optimizer by it, estimated.
        recompute_overhead: Seconds of recomputation as a fraction of the plain step's.
        second_gathers: Units under `fully_shard` that are gathered again for their backward.
    """

    peak_bytes: int
    step_seconds: float
    recompute_overhead: float
    second_gathers: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one planner made of the budget.

    Attributes:
        planner: Its name.
        peak_bytes: The peak of its plan, or the lowest that it reaches where that is above the budget.
        recompute_overhead: None where it does not fit.
        planning_seconds: What it took.
    """

    planner: str
    peak_bytes: int
    recompute_overhead: float | None
    planning_seconds: float


@dataclass(frozen=True, slots=True)
class Study:
    """The answer.

    Attributes:
        result: Batch size, plan, peaks; measured on fake tensors.
        contents: What is alive at the plain step's peak.
        plain_peak_at: The operation at which that is.
        lowest_bytes: The lowest peak of the step at that batch size.
        curve: Time over memory, lowest peak first.
        largest: The largest batch size that fits, where it is asked for.
        fastest: That with the most samples a second.
        attempts: All planners at the budget, where they are asked.
    """

    result: Result
    contents: Contents
    plain_peak_at: str
    lowest_bytes: int
    curve: tuple[Point, ...]
    largest: Candidate | None
    fastest: Candidate | None
    attempts: tuple[Attempt, ...]


def study(network: Network, request: Request, tell: Tell) -> Study:
    """The answer to the request; to be called under the network's fake tensor mode.

    Raises:
        InfeasibleBudgetError: Nothing fits; carries the lowest peak.
        TraceError: Nothing of the model can be captured.
    """
    trial = network.trial
    settings = Settings(
        planner=request.planner,
        memory_budget=request.memory or (request.device.memory_bytes if request.device else None) or ALL_BYTES,
        batch_size="auto" if request.asks_batch_size else "keep",
    )
    sizes = sizes_to_consider(trial, settings)
    profiled = (trial.batch_size // 2, trial.batch_size) if len(sizes) > 1 else (trial.batch_size,)
    tell(f"profiling every operation of {network.name} at batch size {' and '.join(map(str, profiled))}")
    model = model_step(trial, profiled, with_scratch=False)
    search = CandidateSearch(trial.batch_size, settings, sizes, model, ALL_BYTES, ALL_BYTES)
    tell("planning the largest batch size" if len(sizes) > 1 else "planning")
    choice = first_choice(trial, search, may_grow=True)
    choice, measured = _executed(network, search, choice, tell)
    plain = search.plain_peak(choice.batch_size)
    result = Result(choice.batch_size, choice.budget_bytes, choice.step, measured, plain, choice.candidates)
    largest = fastest = None
    if len(sizes) > 1:
        tell("planning the fastest batch size")
        largest = search.trials[choice.batch_size]
        search.settings = replace(settings, objective="throughput")
        found = search.choose()
        fastest = search.trials[found.batch_size]
        trials = tuple(
            replace(c, measured_peak_bytes=measured) if c.batch_size == choice.batch_size else c
            for c in found.candidates
        )
        result = replace(result, trials=trials, choice=f"{choice.reason}; {found.reason}")
    else:
        result = replace(result, choice=choice.reason)
    tell("drawing the curve of time over memory")
    wider = with_apart(trial, search.model, with_scratch=False)
    curve = _curve(wider, choice.batch_size, plain, request.planner, tell)
    unplanned = plain_step(choice.step)
    view = view_step(unplanned)
    node = view.plan.graph.nodes[view.plan.schedule.actions[view.peak_position].node]
    return Study(
        result=result,
        contents=contents_at(unplanned, view, view.peak_position),
        plain_peak_at=node.name,
        lowest_bytes=min(curve[0].peak_bytes, choice.step.predicted_peak_bytes),
        curve=curve,
        largest=largest,
        fastest=fastest,
        attempts=tuple(_attempts(search, choice, tell)) if request.compare else (),
    )


def _executed(network: Network, search: CandidateSearch, choice: Choice, tell: Tell) -> tuple[Choice, int]:
    """The choice and the peak of its step as run on fake tensors; another choice where that exceeds the budget."""
    measured = 0
    for _ in range(_MOST_TRIES):
        tell(f"running the planned step at batch size {choice.batch_size} on fake tensors")
        modules = install(network.trial, choice.batch_size, choice.step, search.settings.planner)
        try:
            measured = network.trial.measure(choice.batch_size, with_scratch=False)
        finally:
            uninstall(modules)
        if measured <= choice.budget_bytes:
            return choice, measured
        search.correct(measured - choice.step.predicted_peak_bytes, choice.batch_size)
        choice = search.choose()
    raise InfeasibleBudgetError(
        f"the planned step was run {_MOST_TRIES} times and exceeded the budget each time",
        minimum_bytes=measured,
        budget_bytes=choice.budget_bytes,
    )


def _curve(model: StepModel, size: int, plain_bytes: int, planner: str, tell: Tell) -> tuple[Point, ...]:
    """From the lowest peak to the plain step."""
    lowest = _least_budget(model, size, planner)
    points: list[Point] = []
    for i in range(NUM_POINTS):
        tell(f"drawing the curve of time over memory, {i + 1} of {NUM_POINTS}")
        budget = lowest + (plain_bytes - lowest) * i // (NUM_POINTS - 1)
        step = model.plan(size, budget, planner)
        seconds = step.seconds + step.surroundings.seconds
        gathering = step.surroundings.gathering
        gathers = 0 if gathering is None else gathering.second_gathers
        points.append(Point(step.predicted_peak_bytes, seconds, step.recompute_overhead, gathers))
    return tuple(dict.fromkeys(points))


def _least_budget(model: StepModel, size: int, planner: str) -> int:
    """One that suffices: at that a planner may come to a lower peak yet, which it does not find for a lower budget."""
    try:
        return model.plan(size, 1, planner).predicted_peak_bytes
    except InfeasibleBudgetError as error:
        return error.sufficient_bytes


def _attempts(search: CandidateSearch, choice: Choice, tell: Tell) -> list[Attempt]:
    """Every planner at the budget."""
    size, found = choice.batch_size, list[Attempt]()
    budget = min(choice.budget_bytes, search.plain_peak(size))
    for name in PLANNERS:
        tell(f"comparing: {name}")
        start = time.perf_counter()
        try:
            step = search.model.plan(size, budget, name)
            peak, overhead = step.predicted_peak_bytes, step.recompute_overhead
        except InfeasibleBudgetError as error:
            peak, overhead = error.sufficient_bytes, None
        found.append(Attempt(name, peak, overhead, time.perf_counter() - start))
    return found
