"""What was planned before in a process changes no answer: nothing that is remembered leads a planner elsewhere."""

import json
import subprocess
import sys
from functools import cache

import pytest
from script_runs import ENVIRONMENT, FOLDER

from lightning_remat import PLANNERS

Answers = dict[str, dict[str, list[str]]]


@cache
def planned(*names: str) -> Answers:
    """What a process of its own answers to budgets in percent of the plain peak, in that order."""
    command = [sys.executable, str(FOLDER / "planning_order.py"), *names]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("planner", PLANNERS)
def test_answers_do_not_depend_on_what_was_planned_before(planner: str) -> None:
    asked = "60@net", "60@doubled", "45@net", "60@slower"
    there = planned(*asked, *asked)[planner]
    back = planned(*reversed(asked))[planner]
    assert set(there) == set(back) == set(asked)
    for name in asked:
        first, again = there[name]
        assert first == again == back[name][0], name
    assert len({answers[0] for answers in there.values()}) > 1, "the questions are too much alike to tell"
