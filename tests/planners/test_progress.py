"""The bar of long searches: silent at first and without a terminal, there while a solver's call blocks."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from lightning_remat.planners import _progress as progress
from lightning_remat.planners._progress import SearchProgress


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal shows; the bar's patience is a tenth of a second."""
    shown = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=shown, force_terminal=True, width=80))
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.1)
    return shown


def test_a_short_search_shows_nothing(screen: io.StringIO) -> None:
    with SearchProgress("checkmate") as bar:
        bar.update(0.5, "relaxation 1 of 2")
    assert not screen.getvalue()


def test_a_call_that_lasts_shows_its_stage(screen: io.StringIO) -> None:
    with SearchProgress("checkmate") as bar:
        bar.update(0.5, "relaxation 1 of 2")
        time.sleep(0.4)
    assert "checkmate: relaxation 1 of 2" in screen.getvalue()


def test_without_a_terminal_it_is_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.01)
    with SearchProgress("checkmate") as bar:
        bar.update(0.5, "relaxation 1 of 2")
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "")


def test_an_error_ends_the_bar(screen: io.StringIO) -> None:
    def search() -> None:
        with SearchProgress("checkmate"):
            time.sleep(0.3)
            raise RuntimeError("solver")

    with pytest.raises(RuntimeError, match="solver"):
        search()
    assert "\x1b[?25h" in screen.getvalue(), "the cursor is back"
