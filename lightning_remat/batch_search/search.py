"""Search over batch size × schedule: planned sizes first, and only what was executed is returned."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from ..budget import ALL_BYTES, format_bytes
from ..devices import counts_memory
from ..errors import InfeasibleBudgetError, MismatchError, TraceError
from ..measure.device_memory import device_memory
from ..measure.out_of_memory import is_out_of_memory, is_too_small_for_batch_norm
from ..plans.planner import plan
from ..reports.plots import load_plotting
from ..reports.result import Result
from ..schedules.floor import find_floor
from .candidates import CandidateSearch, Choice
from .executed import excess_of, execute, reservation, reserved_bytes
from .settings import Settings
from .trial import (
    STEPS_PER_TRIAL,
    StepModel,
    Trial,
    install,
    install_together,
    model_step,
    uninstall,
    with_apart,
)

logger = logging.getLogger(__name__)

MOST_STEPS = 8
"""Real training steps that a search runs at most; the last two only where others ran out of memory or exceeded.

Where graphs that no plan knows turn up in them, as many again; where nothing seems to fit, four before.
"""

_MOST_REPLAYS = 4
"""Choices that are looked at for gaps before one is executed."""

_MOST_TRIES = MOST_STEPS // STEPS_PER_TRIAL

_LARGEST_PROFILE = 32
_LARGEST_SIZE = 1 << 20

_NEARLY = 0.99
"""Of the predicted peak, below which the measured one leaves room for another plan."""

_PLAUSIBLE = 1.5
"""Times the budget, up to which a step is executed that may need less than predicted."""

_NOTICEABLY = 0.98
"""Of a floor, below which another is worth a second search."""


def find(trial: Trial, settings: Settings, *, lowest: bool = False) -> tuple[Result, list[nn.Module]]:
    """The batch size and plan that the settings ask for, executed within the budget, and the modules rewritten by it.

    Bytes and seconds of every size come from a profile (two where several sizes are in question); the planner is
    called for each candidate and no training step is run. The choice is then executed: two real steps with optimizer.
    Where the measured peak exceeds the budget, the model is corrected by the difference and the search goes on; it
    never returns what it did not execute, and runs at most `MOST_STEPS` real steps.

    Args:
        trial: The training step.
        settings: What is asked for.
        lowest: Whether the lowest peak of the smallest size is wanted, whatever the budget.

    Raises:
        InfeasibleBudgetError: Nothing fits. Nothing is installed then, as on any other error.
        TraceError: Nothing can be captured, or never the same twice.
    """
    try:
        return _found(trial, settings, lowest=lowest)
    except MismatchError as error:
        logger.info("planned once more, as what was captured has changed meanwhile: %s", error)
    try:
        return _found(trial, settings, lowest=lowest)
    except MismatchError as error:
        raise TraceError(f"the training step is captured as something else whenever it is run: {error}") from error


def _found(trial: Trial, settings: Settings, *, lowest: bool) -> tuple[Result, list[nn.Module]]:
    search = _prepared(trial, settings, lowest=lowest)
    uncorrected = search.model
    largest = search.sizes[-1]
    good: Result | None = None
    measured: int | None = None
    executed: dict[int, int] = {}
    tries, ran_out, num_steps = _MOST_TRIES - 1, False, 0
    for number in range(_MOST_TRIES):
        if number == tries:
            break
        try:
            choice = first_choice(trial, search, may_grow=not number) if good is None else trial.share(search.choose)
        except InfeasibleBudgetError as error:
            if good is not None:
                break
            if search.plain_steps or lowest or error.minimum_bytes <= (error.budget_bytes or 0):
                raise
            num_steps += _measure_before_refusing(trial, search, uncorrected, with_leanest=not num_steps)
            choice = trial.share(search.choose)
        choice = _reserved(trial, search, choice)
        size, step = choice.batch_size, choice.step
        if good is not None and (size, -step.seconds) <= (good.batch_size, -good.step.seconds):
            break
        modules, measured, num_more = execute(trial, choice, settings)
        num_steps += num_more
        if measured is None:
            logger.info("batch size %d ran out of memory, predicted were %d bytes", size, step.predicted_peak_bytes)
            search.recount(_free_bytes(trial))
            search.tighten(choice)
            tries, ran_out = _MOST_TRIES, True
            continue
        executed[size] = measured
        if max(measured, step.predicted_peak_bytes) > step.surroundings.optimizer_step_bytes:
            # The optimizer's step is no more than predicted, so the peak lies before it, in forward and backward.
            search.correct(excess_of(trial, settings, step, measured), size)
        if measured <= choice.budget_bytes or lowest:
            trials = tuple(replace(c, measured_peak_bytes=executed.get(c.batch_size)) for c in choice.candidates)
            budget = max(measured, choice.budget_bytes)
            plain = search.plain_peak(size)
            kept = reserved_bytes(trial, step) if counts_memory(trial.device) else None
            found = Result(size, budget, step, measured, plain, trials, num_steps, choice.reason, kept)
            is_tight = ran_out and measured < _NEARLY * choice.budget_bytes
            leaves_room = is_tight or measured < _NEARLY * step.predicted_peak_bytes
            may_grow = leaves_room and (step.num_recomputed or size != largest)
            if lowest or not may_grow or (good is not None and not is_tight):
                return found, modules
            good = found
            if is_tight:
                search.loosen()
        uninstall(modules)
        search.recount(_free_bytes(trial))
        if good is None and number + 2 >= tries:
            tries = _MOST_TRIES
            search.leave_room(step.predicted_peak_bytes / measured)  # the next may be wrong by as much as this one was
    if good is not None:
        return good, install_together(trial, good.batch_size, good.step, settings.planner)
    needed = "more than the device has" if measured is None else format_bytes(measured)
    raise InfeasibleBudgetError(
        f"the planned step was executed {tries} times and exceeded the budget each time, the last time at "
        f"{needed}: raise memory_budget",
        minimum_bytes=math.inf if measured is None else measured,
    )


def _measure_before_refusing(
    trial: Trial, search: CandidateSearch, uncorrected: StepModel, *, with_leanest: bool
) -> int:
    """Executes the plain step and the leanest one, and corrects what is predicted by them; how many steps were run.

    What the code between the regions takes for a moment no profile tells, and of what it saves none when it goes. After
    a planned step was executed what is predicted of others is correct, but not of the plain one, which has no hooks.
    One that is predicted to need far more than the budget is left out, unless the budget is a part of what it needs.
    """
    free, size = search.free_bytes, search.sizes[0]
    plain = trial.share(lambda: search.model.plan(size, ALL_BYTES, "keep_all"))
    is_relative = isinstance(search.settings.memory_budget, str)
    is_plausible = is_relative or uncorrected.plain_timeline(size).peak_bytes <= _PLAUSIBLE * search.budget(size)
    may_run = is_plausible and plain.predicted_peak_bytes <= free
    choices = [Choice(size, "", plain, free, ())] if trial.least(int(may_run)) else []
    if with_leanest:
        choices.append(trial.share(search.leanest)._replace(budget_bytes=free))
    num_steps = 0
    for choice in choices:
        modules, measured, num_more = execute(trial, choice, search.settings)
        uninstall(modules)
        num_steps += num_more
        if measured is None:
            continue
        excess = excess_of(trial, search.settings, choice.step, measured)
        if choice.step is plain:
            search.know_plain(plain.corrected(excess), size)
        elif measured > choice.step.surroundings.optimizer_step_bytes:
            search.correct(excess, size)
    return num_steps


def _prepared(trial: Trial, settings: Settings, *, lowest: bool) -> CandidateSearch:
    """What is known before anything is executed."""
    sizes = sizes_to_consider(trial, settings)
    while len(sizes) > 1 and _refuses(trial, sizes[0]):
        sizes = sizes[1:]
    model = _model(trial, sizes, settings)
    takes_from_budget = settings.memory_budget is None and trial.device.type == "cpu"  # the search itself
    if takes_from_budget:
        _warm_up(model, settings)
    total_bytes = trial.least(device_memory(trial.device).total_bytes)
    search = CandidateSearch(trial.batch_size, settings, sizes, model, _free_bytes(trial), total_bytes)
    search.model = _refined(trial, search)
    if takes_from_budget:
        _rehearse(trial, search)
    if lowest:
        search.exchange(with_apart(trial, search.model, with_scratch=settings.counts_scratch))
        search.settle_for_lowest(trial.share(search.lowest_peak))
    return search


def _refuses(trial: Trial, size: int) -> bool:
    """Whether a batch norm of the model refuses batches of that size: a lower limit, not a lack of memory."""
    if not any(isinstance(m, _BatchNorm) for m in trial.module.modules()):
        return False
    try:
        trial.look_through(size)
    except Exception as error:
        if is_too_small_for_batch_norm(error):
            logger.info("batch norm needs more than %d samples a batch", size)
            return True
        logger.info("what a step of %d samples raises is told if that size is chosen: %r", size, error)
    return False


def first_choice(trial: Trial, search: CandidateSearch, *, may_grow: bool) -> Choice:
    """What to execute; regions may run out of place where nothing fits otherwise, and where that lets a size grow.

    Args:
        trial: The training step.
        search: What is known; it goes on with the model of the choice.
        may_grow: Whether to look for a larger size that way, where the largest is asked for.

    Raises:
        InfeasibleBudgetError: Nothing fits either way.
    """
    own = search.model
    try:
        choice = trial.share(search.choose)
    except InfeasibleBudgetError:
        search.exchange(with_apart(trial, own, with_scratch=search.settings.counts_scratch))
        if not search.model.apart:
            raise
        return trial.share(search.choose)
    size = choice.batch_size
    if not may_grow or search.settings.objective == "throughput" or size == search.sizes[-1]:
        return choice
    wider = with_apart(trial, own, with_scratch=search.settings.counts_scratch)
    # Measured scratch is not the same on every rank: by their own floors some would search again and others not.
    if trial.share(lambda: _has_lower_floor(wider, size)):
        search.exchange(wider)
        with suppress(InfeasibleBudgetError):  # a shared budget is divided step by step: more options may lead astray
            other = trial.share(search.choose)
            if other.batch_size > size:
                logger.info("in-place activations are planned out of place, which lets their inputs go earlier")
                return other
        search.exchange(own)
    return choice


def _reserved(trial: Trial, search: CandidateSearch, choice: Choice) -> Choice:
    """The choice, or the next one that by the model of it a device's allocator finds room for; the first if none is."""
    if not (search.settings.counts_scratch and counts_memory(trial.device)):
        return choice
    for _ in range(_MOST_REPLAYS):
        step = choice.step
        needed = -trial.least(-reservation(trial, step).needed_bytes)
        if needed <= choice.budget_bytes:
            break
        gaps = needed - step.predicted_peak_bytes
        logger.info("batch size %d leaves gaps of %d bytes in the device's memory", choice.batch_size, gaps)
        search.leave_gaps(gaps)
        try:
            choice = trial.share(search.choose)
        except InfeasibleBudgetError:
            break  # the step tells
    return choice


def _has_lower_floor(model: StepModel, size: int) -> bool:
    """Whether a region out of place may go noticeably lower than in place."""
    graphs, apart = model.graphs_at(size), model.apart_at(size)
    return any(find_floor(graph).bytes < _NOTICEABLY * find_floor(graphs[k]).bytes for k, graph in apart.items())


def _free_bytes(trial: Trial) -> int:
    """What every rank has for the step now, what is alive of it already included."""
    return trial.least(device_memory(trial.device).free_bytes + trial.alive_bytes())


def _warm_up(model: StepModel, settings: Settings) -> None:
    """Lets planner and plots take what they keep of the machine's memory (code) before the rest is counted."""
    load_plotting()
    for graph in model.graphs_at(model.line.large if model.line is not None else 1).values():
        with suppress(InfeasibleBudgetError):
            plan(graph, 0, settings.planner)


def _rehearse(trial: Trial, search: CandidateSearch) -> None:
    """Plans and rewrites once, for what that keeps of the machine's memory, and counts again what is free."""
    with suppress(InfeasibleBudgetError):
        choice = trial.share(search.choose)
        try:
            uninstall(install(trial, choice.batch_size, choice.step, search.settings.planner))
        except MismatchError as error:
            logger.info("what the execution will tell on all ranks: %s", error)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.info("not even the calls of batch size %d fit beside what planning keeps", choice.batch_size)
    gc.collect()  # what the error held
    search.recount(_free_bytes(trial))


def _model(trial: Trial, sizes: Sequence[int], settings: Settings) -> StepModel:
    if len(sizes) > 1:
        large = max(4, min(trial.batch_size, _LARGEST_PROFILE))
        sizes = (large // 2, large)
    return model_step(trial, sizes, with_scratch=settings.counts_scratch)


def _refined(trial: Trial, search: CandidateSearch) -> StepModel:
    """The model, profiled at larger sizes where the loader's is small and the plain step of larger ones fits.

    Next to nothing is measured at a batch of two but what it costs to call an operation.
    """
    line = search.model.line
    if line is None:
        return search.model
    large = line.large
    while large < min(_LARGEST_PROFILE, search.sizes[-1]) and search.plain_peak(2 * large) <= search.budget(2 * large):
        large *= 2
    large = trial.least(large)
    if large == line.large:
        return search.model
    return model_step(trial, (large // 2, large), with_scratch=search.settings.counts_scratch)


def sizes_to_consider(trial: Trial, settings: Settings) -> Sequence[int]:
    """The batch sizes that the settings allow, ascending.

    Raises:
        ValueError: There is none.
    """
    if settings.batch_size == "keep":
        return [trial.batch_size]
    if settings.batch_size != "auto":
        return [settings.batch_size]
    step = settings.multiple_of
    least = -(-settings.min_batch_size // step) * step
    most = min(filter(None, (settings.max_batch_size, trial.most_samples)), default=_LARGEST_SIZE)
    if settings.effective_batch_size is None:
        sizes: Sequence[int] = range(least, most + 1, step)
    else:
        samples, rest = divmod(settings.effective_batch_size, trial.num_devices)
        most = min(most, samples)
        sizes = [] if rest else [s for s in range(least, most + 1, step) if samples % s == 0]
    if any(trial.leaves_one_sample(s) for s in sizes):
        sizes = [s for s in sizes if not trial.leaves_one_sample(s)]
    if not sizes:
        raise ValueError(
            f"no batch size is left to consider: min_batch_size={settings.min_batch_size}, at most {most} samples, "
            f"multiple_of={step}, effective_batch_size={settings.effective_batch_size}, {trial.num_devices} devices, "
            "and none that leaves a batch norm a last batch of one sample"
        )
    return sizes
