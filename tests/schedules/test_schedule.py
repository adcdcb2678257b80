import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_remat import Schedule, ScheduleError
from lightning_remat.schedules.schedule import Action

actions = st.builds(Action, st.sampled_from("FBDT"), st.integers(0, 99))


@given(st.lists(actions))
def test_text_round_trip(listed: list[Action]) -> None:
    schedule = Schedule(tuple(listed))
    assert Schedule.parse(str(schedule)) == schedule
    assert len(schedule) == len(listed)
    assert list(schedule) == listed


def test_the_wrong_word_is_marked() -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse("F0 F1 X2 B1 B0")
    assert caught.value.position == 2
    line, carets, reason = str(caught.value).splitlines()
    assert line[carets.index("^") : carets.rindex("^") + 1] == "X2"
    assert "not an action" in reason


def test_long_schedules_are_marked_in_their_surroundings() -> None:
    text = " ".join(f"F{i}" for i in range(100)) + " B-1"
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(text)
    line, carets, _ = str(caught.value).splitlines()
    assert line.startswith("… F92")
    assert line[carets.index("^") :] == "B-1"
