"""A progress bar for searches that take longer than two seconds, on terminals alone."""

from __future__ import annotations

from threading import Timer

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

PATIENCE_SECONDS = 2.0


class SearchProgress:
    """Shows how far a search has come once it has lasted `PATIENCE_SECONDS`; silent where stderr is no terminal.

    A thread starts and redraws the bar, so that it appears in the middle of a solver's call too.
    """

    def __init__(self, title: str) -> None:
        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        self._bar = Progress(*columns, console=console, transient=True)
        self._title = title
        self._task = self._bar.add_task(title, total=1.0)
        self._starter = Timer(PATIENCE_SECONDS, self._bar.start) if console.is_terminal else None

    def __enter__(self) -> SearchProgress:
        if self._starter is not None:
            self._starter.daemon = True
            self._starter.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._starter is not None:
            self._starter.cancel()
            self._starter.join()
            if self._bar.live.is_started:
                self._bar.stop()

    def update(self, fraction: float, stage: str) -> None:
        """Says that `fraction` of the search is done and what it does now."""
        self._bar.update(self._task, completed=fraction, description=f"{self._title}: {stage}")
