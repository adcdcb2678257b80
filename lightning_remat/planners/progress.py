"""A progress bar for searches that take longer than two seconds, on terminals alone."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import Progress

PATIENCE_SECONDS = 2.0


class SearchProgress:
    """Shows how far a search has come once it has lasted `PATIENCE_SECONDS`; silent where stderr is no terminal."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._start = time.perf_counter()
        self._bar: Progress | None = None
        self._is_wanted = sys.stderr.isatty()

    def __enter__(self) -> SearchProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, fraction: float, stage: str) -> None:
        """Says that `fraction` of the search is done and what it does now."""
        if not self._is_wanted or time.perf_counter() - self._start < PATIENCE_SECONDS:
            return
        if self._bar is None:
            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.add_task(self._title, total=1.0)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=fraction, description=f"{self._title}: {stage}")
