"""Where every training loader passes through: it gets its batch size there, or is read from and begun again."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_warn

from ..batch_search.settings import Settings
from ..module_state.random_state import RandomState, preserved_random
from .loaders import begin_again, loader_batch_size, readable, rebatched
from .private_api import build_loaders, built_loaders, forget_loaders, next_batch, offer_loaders
from .setup import accumulate, holders_of


class LoaderTap:
    """Called with every loader that the trainer prepares.

    Args:
        trainer: Whose loaders they are.
        settings: Of the callback.

    Attributes:
        batch_size: What the training loaders are changed to; None leaves them as they are.
        loaders: Those of the last preparation for training, as they came.
    """

    def __init__(self, trainer: Trainer, settings: Settings) -> None:
        self.trainer, self.settings = trainer, settings
        self.batch_size: int | None = None
        self.loaders: list[Any] = []
        self._is_open = settings.batch_size == "auto"  # the batch size, so that loaders may have to begin again
        self._is_reading = False
        self._undo_reading: list[Callable[[], None]] = []
        self._when_built: Callable[[], None] = lambda: None  # puts back the random states before anything was read
        self._built: CombinedLoader | None = None
        self._was_early = False  # built while optimizers were configured, which asked for the number of steps
        self._random_before: RandomState | None = None

    def __call__(self, loader: Any) -> Any:
        """The loader that serves in its place."""
        trainer, settings = self.trainer, self.settings
        if self.batch_size is not None and (trainer.training or settings.include_validation):
            loader = self._rebatched(loader)
        if not trainer.training:
            return loader
        size = loader_batch_size(loader)
        if size is not None and settings.batch_size == "keep":
            accumulate(trainer, size, settings)
        if self._is_open:
            self.loaders.append(loader)
            self._undo_reading.append(begin_again(loader))
            self._when_built = RandomState.of_all().put_back
            return readable(loader) if self._is_reading else loader
        return loader

    @contextmanager
    def first_batch(self) -> Generator[Any]:
        """The first batch that training would get, as the loader yields it; None where there is none.

        In the block the trainer has its loaders, of the present batch size. Afterwards all that was read is put back,
        global random states apart, and `offer` makes the loaders that were built those of training.
        """
        trainer = self.trainer
        early, self._random_before = built_loaders(trainer), RandomState.of_all()
        if early is not None:
            self._was_early = True
            self._put_back()
            offer_loaders(trainer, early, lambda: None)
        when_built = self._when_built
        self.loaders, self._undo_reading, self._is_reading = [], [], True
        try:
            self._built = build_loaders(trainer)
        finally:
            self._is_reading = False
        if early is not None:
            self._when_built = when_built
        try:
            yield None if self._built is None else next_batch(trainer)
        finally:
            self._put_back()
            if self._built is not None:
                self._built.flattened = list(self.loaders)

    def _put_back(self) -> None:
        forget_loaders(self.trainer)
        for undo in reversed(self._undo_reading):
            undo()

    def offer(self, *, with_optimizers: bool) -> None:
        """Training gets the loaders that were built, of the batch size that is asked for now.

        What building them drew from the global random states is drawn when Lightning would have built them.

        Args:
            with_optimizers: Whether optimizers and schedulers are configured again: they may count the batches.
        """
        trainer, self._is_open = self.trainer, False
        if self._built is None and (early := built_loaders(trainer)) is not None:  # nothing was read
            self._built, self._was_early = early, True
            self._put_back()
        if self._built is not None:
            forget_loaders(trainer)
            offer_loaders(trainer, self._built, self._draw)
        with preserved_random():
            if self._was_early:
                self._when_built()
            if with_optimizers:
                trainer.strategy.setup_optimizers(trainer)
            if self._was_early and built_loaders(trainer) is None:
                build_loaders(trainer)

    def _draw(self) -> None:
        if not self._was_early and self._random_before is not None and self._random_before.is_current():
            self._when_built()

    def _rebatched(self, loader: Any) -> Any:
        present, name = loader_batch_size(loader), self.settings.batch_arg_name
        if present == self.batch_size:
            return loader
        has_holders = bool(holders_of(self.trainer, name))
        if present is None and has_holders and self.settings.rebatch_fn is None:
            return loader  # it may have been built by that attribute: the first batch will tell
        if self.trainer.training and has_holders and self.settings.batch_size != "auto":
            rank_zero_warn(
                f"the training loader ignores the attribute {name!r} and yields batches of {present}: "
                f"Rematerialization has replaced its batch sampler by one of {self.batch_size}"
            )
        assert self.batch_size is not None, "rebatched without a size"
        return rebatched(loader, self.batch_size, self.settings.rebatch_fn)
