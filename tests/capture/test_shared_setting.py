"""What all threads share is as it was after the last of them, in whatever order they end."""

from types import SimpleNamespace

from lightning_remat.capture.shared_setting import Exchange, SharedSettings


def test_the_first_to_end_does_not_take_it_from_the_other() -> None:
    holder = SimpleNamespace(is_on=False)
    setting = SharedSettings(Exchange(holder, "is_on", lambda _: True))
    first, second = setting.wanted(), setting.wanted()
    with first:
        second.__enter__()
    assert holder.is_on
    second.__exit__(None, None, None)
    assert not holder.is_on
