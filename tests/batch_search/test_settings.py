"""Wrong arguments raise ValueError in the constructor, by name; idle ones are named."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from torch import nn

from lightning_remat import Rematerialization
from lightning_remat.batch_search.settings import Settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"planner": "nonsense"}, r"unknown planner 'nonsense'; the planners are .*periodic"),
        ({"planner": 3}, "planner is 3"),
        ({"memory_budget": "8 parsecs"}, "memory_budget is '8 parsecs'"),
        ({"memory_budget": 0}, "memory_budget is 0"),
        ({"memory_budget": 1.5}, r"memory_budget is 1\.5"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": "big"}, "batch_size is 'big'"),
        ({"margin": 1.0}, r"margin is 1\.0"),
        ({"objective": "speed"}, "objective is 'speed', expected 'batch_size' or 'throughput'"),
        ({"max_overhead": -0.1}, r"max_overhead is -0\.1"),
        ({"min_batch_size": 0}, "min_batch_size is 0"),
        ({"min_batch_size": 9, "max_batch_size": 8}, "max_batch_size is 8, below the smallest size allowed, 9"),
        ({"multiple_of": 8, "max_batch_size": 7}, "max_batch_size is 7, below the smallest size allowed, 8"),
        ({"batch_size": 10, "multiple_of": 4}, "batch_size is 10, no multiple of multiple_of=4"),
        ({"batch_size": 10, "effective_batch_size": 25}, "effective_batch_size is 25, no multiple of batch_size=10"),
        ({"batch_arg_name": "batch size"}, "batch_arg_name is 'batch size'"),
        ({"rebatch_fn": 3}, "rebatch_fn is 3"),
        ({"on_infeasible": "ignore"}, "on_infeasible is 'ignore'"),
        ({"on_oom": "ignore"}, "on_oom is 'ignore'"),
        ({"modules": "net"}, "modules is 'net', expected a list"),
        ({"modules": 5}, "modules is 5, expected a list"),
        ({"modules": []}, r"modules is \[\], expected a list"),
        ({"modules": ["net", 5]}, r"modules is \['net', 5\], expected a list"),
        ({"modules": nn.Sequential(nn.ReLU())}, r"modules is Sequential\("),
        ({"plan_path": 5}, "plan_path is 5, expected a path"),
        ({"report_dir": True}, "report_dir is True, expected a path"),
        ({"batch_arg_name": 5}, "batch_arg_name is 5, expected the name"),
        ({"resume": "no"}, "resume is 'no', expected True or False"),
        ({"objective": 5}, "objective is 5, expected 'batch_size' or 'throughput'"),
        ({"memory_budget": [8]}, r"memory_budget is \[8\]"),
        ({"batch_size": np.int64(0)}, "batch_size is 0"),
        ({"batch_size": [8]}, r"batch_size is \[8\]"),
        ({"margin": "5%"}, "margin is '5%'"),
    ],
)
def test_wrong_argument(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rematerialization(**{"planner": "periodic", **arguments})


def test_numbers_of_numpy_are_as_good_as_those_of_python() -> None:
    given = Settings(batch_size=np.int64(8), memory_budget=np.int32(100), multiple_of=np.uint8(4), margin=np.float32(0))
    assert given == Settings(batch_size=8, memory_budget=100, multiple_of=4, margin=0)
    assert type(given.batch_size) is type(given.memory_budget) is type(given.multiple_of) is int
    assert Settings(memory_budget=np.float32(0.5)).counts_scratch


def test_callback_pickles() -> None:
    callback = pickle.loads(pickle.dumps(Rematerialization("periodic", memory_budget="1GiB")))
    assert callback.settings == Settings(planner="periodic", memory_budget="1GiB")
    assert callback.result is None


def test_idle_settings_are_named() -> None:
    idle = Settings(planner="periodic", batch_size="keep", multiple_of=4, memory_budget="1GiB", margin=0.1)
    assert idle.without_effect() == ["multiple_of", "margin"]
    assert Settings(planner="periodic", multiple_of=4, margin=0.1).without_effect() == []
