"""The report's figures where people look for them: beside the curves, in TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from lightning.pytorch.loggers import Logger, TensorBoardLogger

from ..reports.plots import can_plot


def show_in_loggers(loggers: Iterable[Logger], folder: Path) -> None:
    """Gives the plots in the folder to each logger that shows images."""
    for path in sorted(folder.glob("remat_*.png")):
        name = f"remat/{path.stem.removeprefix('remat_')}"
        for logger in loggers:
            if isinstance(logger, TensorBoardLogger):
                if can_plot():
                    from matplotlib import image  # imported here: the package works without it

                    pixels = cast(Any, image).imread(path)
                    cast(Any, logger).experiment.add_image(name, pixels, dataformats="HWC")
            elif (log_image := getattr(logger, "log_image", None)) is not None:  # Weights & Biases, and its like
                log_image(name, [str(path)])
