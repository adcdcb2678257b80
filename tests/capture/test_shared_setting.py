"""What all threads share is as it was after the last of them, in whatever order they end."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest

from lightning_remat.capture.shared_setting import Exchange, OnlyHere, SharedSettings


def test_the_first_to_end_does_not_take_it_from_the_other() -> None:
    holder = SimpleNamespace(is_on=False)
    setting = SharedSettings(Exchange(holder, "is_on", lambda _: True))
    first, second = setting.wanted(), setting.wanted()
    with first:
        second.__enter__()
    assert holder.is_on
    second.__exit__(None, None, None)
    assert not holder.is_on


@pytest.mark.parametrize("here", [False, True])
def test_a_flag_is_another_in_the_thread_that_captures_alone(here: bool) -> None:
    holder = SimpleNamespace(is_on=not here)
    with (
        SharedSettings(Exchange(holder, "is_on", partial(OnlyHere, here=here))).wanted(),
        ThreadPoolExecutor(1) as other,
    ):
        assert bool(holder.is_on) is here
        assert other.submit(lambda: bool(holder.is_on)).result() is not here
    assert holder.is_on is not here


class Holder:
    """Has what it has from its class."""

    number = 1


def test_what_is_the_classs_is_no_attribute_of_the_object_afterwards() -> None:
    holder = Holder()
    with SharedSettings(Exchange(holder, "number", lambda own: own + 1)).wanted():
        assert holder.number == 2
    assert not vars(holder)
    handlers: dict[str, object] = {"none": None}
    with SharedSettings(Exchange(handlers, "none", lambda _: 1), Exchange(handlers, "new", lambda _: 2)).wanted():
        assert handlers == {"none": 1, "new": 2}
    assert handlers == {"none": None}


def test_of_changes_of_which_one_fails_none_is_made() -> None:
    holder = SimpleNamespace(number=1)
    setting = SharedSettings(
        Exchange(holder, "number", lambda own: own + 1), Exchange(holder, "absent", lambda own: own)
    )
    for _ in range(2):
        with pytest.raises(AttributeError, match="absent"), setting.wanted():
            pass
        assert vars(holder) == {"number": 1}
