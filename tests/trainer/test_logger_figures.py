"""Plots stand where a logger's users look for images."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_remat.trainer.logger_figures import show_in_loggers


class ShowsImages(Logger):
    """As Weights & Biases' logger does."""

    name = version = "images"

    def __init__(self) -> None:
        super().__init__()
        self.images: dict[str, list[str]] = {}

    def log_hyperparams(self, *args: object, **kwargs: object) -> None: ...

    def log_metrics(self, *args: object, **kwargs: object) -> None: ...

    def log_image(self, key: str, images: list[str]) -> None:
        self.images[key] = images


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard
def test_loggers_that_show_images_show_the_plots(tmp_path: Path) -> None:
    board, shows = TensorBoardLogger(tmp_path / "board"), ShowsImages()
    plot = tmp_path / "remat_timeline.png"
    Image.new("RGB", (4, 3)).save(plot)
    show_in_loggers([board, CSVLogger(tmp_path / "csv"), shows], tmp_path)
    board.experiment.flush()
    assert shows.images == {"remat/timeline": [str(plot)]}
    events = EventAccumulator(board.log_dir).Reload()
    assert events.Tags()["images"] == ["remat/timeline"]
