"""The options of the callback stand once, in `Settings`, and are seen where people look for them."""

import inspect
from dataclasses import fields
from typing import get_type_hints

import pytest

from lightning_remat import Rematerialization
from lightning_remat.batch_search.settings import Settings

OPTIONS = [f.name for f in fields(Settings)]


def test_the_callback_shows_every_option_with_type_and_default() -> None:
    shown = inspect.signature(Rematerialization).parameters
    assert list(shown) == OPTIONS
    assert [p.default for p in shown.values()] == [getattr(Settings(), name) for name in OPTIONS]
    assert set(get_type_hints(Rematerialization.__init__)) == {*OPTIONS, "return"}
    assert shown["planner"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert {p.kind for name, p in shown.items() if name != "planner"} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_documented(name: str) -> None:
    assert f"\n    {name}: " in (inspect.getdoc(Rematerialization) or "")


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize'"):
        Rematerialization(batchsize=4)  # pyright: ignore[reportCallIssue]
