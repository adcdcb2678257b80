"""Plans a trial's step as the settings ask for, or tells why the model is left as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from ..batch_search.search import find
from ..batch_search.settings import Settings
from ..batch_search.trial import install_together, misfit_of
from ..errors import InfeasibleBudgetError, MismatchError, TraceError
from ..regions.look_through import NoCallError
from ..reports.result import Result
from .lightning_step import LightningTrial
from .loaders import loader_batch_size, rebatched
from .private_api import training_loaders


def planned(
    trial: LightningTrial, settings: Settings, leave_alone: Callable[[str], None], settled_size: int | None = None
) -> tuple[Result, list[nn.Module]] | None:
    """What fits, and the modules rewritten by it; None where `leave_alone` was told why not.

    Args:
        trial: The training step.
        settings: What is asked for.
        leave_alone: Is told why the plain model is trained.
        settled_size: The batch size that the loaders have been given; None where the settings tell.

    Raises:
        InfeasibleBudgetError: Nothing fits, and nothing else is asked for then.
        TraceError: Nothing can be captured, and a batch size is asked for.
    """
    wanted = settings if settled_size is None else replace(settings, batch_size=settled_size)
    try:
        return find(trial, wanted)
    except InfeasibleBudgetError as error:
        if settings.on_infeasible == "raise":
            raise
        if settings.on_infeasible == "plain":
            leave_alone(f"on_infeasible='plain': {error}")
            return None
        rank_zero_warn(f"Rematerialization plans the lowest peak instead (on_infeasible='minimum'): {error}")
        return find(trial, wanted, lowest=True)
    except (TraceError, NoCallError) as error:
        if settings.batch_size == "auto" and settings.on_infeasible != "plain":
            raise  # a size is asked for that nothing can be said about
        leave_alone(str(error))
        return None


def installed(trial: LightningTrial, settings: Settings, result: Result) -> tuple[Result, list[nn.Module]] | None:
    """An earlier result, and the modules rewritten by it.

    None, which is told, where it is not for what the step calls now, at the size of the result: the first batch may
    have fewer samples. Every rank takes part.
    """
    own = misfit_of(result.step, trial, result.batch_size)
    reason: str | None = trial.share(lambda: own)
    if reason is None:
        try:
            return result, install_together(trial, result.batch_size, result.step, settings.planner)
        except MismatchError as error:
            reason = str(error)
    rank_zero_warn(f"Rematerialization plans anew: {reason}")
    return None


def check_first_size(trial: LightningTrial, wanted: int | None) -> None:
    """Refuses a first batch of another size than was asked for, of a loader that does not say its size.

    Raises:
        MisconfigurationException: The batch has another size.
    """
    if wanted is None or trial.batch_size == wanted or not trial.has_batch_dimension:
        return
    for loader in training_loaders(trial.trainer):
        if loader_batch_size(loader) != wanted:
            rebatched(loader, wanted)  # says why it cannot be changed
