"""The validation step of a run before training begins: what it needs beside gradients and optimizer state."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer

from ..batch_search.resizing import resized
from ..measure.out_of_memory import is_out_of_memory
from ..module_state.batches import as_new
from .private_api import on_device, run_validation_step

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Validation:
    """A validation step that can be tried.

    Attributes:
        batch: The first one, as the loader yields it.
        told: Its size as the loader tells it.
        follows: Whether its size becomes that of training.
        of_several: Whether there are several loaders.
    """

    batch: Any
    told: int | None
    follows: bool
    of_several: bool

    def run(self, trainer: Trainer, batch_size: int) -> None:
        """One validation step, as it comes while training runs at that batch size.

        What it raises but for a lack of memory is told only: a step that needs its epoch's hooks cannot be tried here.
        """
        batch = resized(self.batch, batch_size, self.told) if self.follows else self.batch
        try:
            run_validation_step(trainer, on_device(trainer, as_new(batch)), of_several=self.of_several)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            logger.info("the memory of validation is not known, as its step cannot be tried by itself: %r", error)
