"""The first training step before training begins: inside all that starts it, and undone."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateFinder, ModelSummary, ProgressBar

from ..batch_search.settings import Settings
from ..module_state.preserve import preserved, preserved_random
from .lightning_step import LightningTrial, StepFailedError
from .loader_tap import LoaderTap
from .private_api import callbacks_of, on_device, silent, state_holders

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
            yield LightningTrial(trainer, settings, batch, is_on_device=False, loaders=tap.loaders)


def _call(trainer: Trainer, hook: str, callbacks: list[Callback], *args: Any) -> None:
    for callback in callbacks:
        getattr(callback, hook)(trainer, trainer.lightning_module, *args)
    getattr(trainer.lightning_module, hook)(*args)
