"""What was planned before in a process changes no answer: nothing that is remembered leads a planner elsewhere."""

import json
import subprocess
import sys
from functools import cache

import pytest
from script_runs import ENVIRONMENT, FOLDER

from lightning_remat import PLANNERS


@cache
def planned(*names: str) -> list[dict[str, str]]:
    """What a process of its own answers for these graphs, in that order."""
    command = [sys.executable, str(FOLDER / "planning_order.py"), *names]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("planner", PLANNERS)
def test_answers_do_not_depend_on_what_was_planned_before(planner: str) -> None:
    net, doubled, slower, again = (found[planner] for found in planned("net", "doubled", "slower", "net"))
    assert again == net
    assert [found[planner] for found in planned("slower", "doubled", "net")] == [slower, doubled, net]
    assert planner == "keep_all" or len({net, doubled, slower}) > 1, "the graphs are too much alike to tell"
