"""The first training step before training begins: inside all that starts it, and undone."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateFinder, ModelSummary, ProgressBar

from ..batch_search.resizing import has_batch_dimension
from ..batch_search.settings import Settings
from ..module_state.preserve import preserved
from ..module_state.random_state import preserved_random
from .lightning_step import LightningTrial, StepFailedError
from .loader_tap import LoaderTap
from .loaders import begin_again, loader_batch_size, readable
from .private_api import callbacks_of, on_device, silent, state_holders, validation_loaders
from .setup import holders_of
from .validation import Validation

logger = logging.getLogger(__name__)

_LEFT_OUT = (ProgressBar, ModelSummary, LearningRateFinder)
"""Callbacks that draw on the screen, or train."""


@contextmanager
def rehearsed(
    trainer: Trainer, settings: Settings, tap: LoaderTap, callback: Callback
) -> Generator[LightningTrial | None]:
    """The training step on the first batch, after the start hooks of module and callbacks; None where none is trained.

    Everything is put back afterwards; the loaders that were built are `tap`'s to offer.

    Args:
        trainer: Stands in `on_fit_start` of the callback.
        settings: Of the callback.
        tap: Sees the loaders.
        callback: Whose hooks are not called.

    Raises:
        StepFailedError: A start hook raises.
    """
    if not (trainer.max_epochs and trainer.max_steps and trainer.limit_train_batches):
        yield None
        return
    module, callbacks = trainer.lightning_module, callbacks_of(trainer)
    others = [c for c in callbacks if c is not callback and not isinstance(c, _LEFT_OUT)]
    later = [c for c in others if callbacks.index(c) > callbacks.index(callback)]
    # What building the loaders changes stays: they are built once.
    with preserved_random(), tap.first_batch() as batch:
        if batch is None:
            yield None
            return
        with preserved([module], [*state_holders(trainer), *others]), silent(trainer):
            try:
                _call(trainer, "on_fit_start", later)
                _call(trainer, "on_train_start", others)
                _call(trainer, "on_train_epoch_start", others)
                _call(trainer, "on_train_batch_start", others, on_device(trainer, batch), 0)
            except Exception as error:
                raise StepFailedError from error
            trial = LightningTrial(trainer, settings, batch, is_on_device=False, loaders=tap.loaders)
            if settings.counts_scratch:  # all that the machine must have is in question
                trial.validation = _first_validation(trainer, settings, tap.loaders)
            try:
                yield trial
            finally:
                trial.close()


def _call(trainer: Trainer, hook: str, callbacks: list[Callback], *args: Any) -> None:
    for callback in callbacks:
        getattr(callback, hook)(trainer, trainer.lightning_module, *args)
    getattr(trainer.lightning_module, hook)(*args)


def _first_validation(trainer: Trainer, settings: Settings, training_loaders: list[Any]) -> Validation | None:
    """The first batch of validation, whose loader begins again afterwards; None where there is none to be had.

    Its size will be that of training where the user wants it, and where it is the same now and both may have been
    built by the attribute that holds the batch size.
    """
    loaders = validation_loaders(trainer)
    if not loaders:
        return None
    loader = loaders[0]
    try:
        put_back = begin_again(loader)
    except MisconfigurationException as error:
        logger.info("the memory of validation is not known: %s", error)
        return None
    try:
        batch = next(iter(readable(loader)), None)
    finally:
        put_back()
    if batch is None:
        return None
    sizes = {loader_batch_size(one) for one in training_loaders}
    is_same = sizes == {loader_batch_size(loader)} and bool(holders_of(trainer, settings.batch_arg_name))
    follows = has_batch_dimension(batch) and (settings.include_validation or is_same)
    return Validation(batch, loader_batch_size(loader), follows, len(loaders) > 1)
