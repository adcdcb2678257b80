"""What holds for every test: examples and random numbers that repeat, and one thread for each of several processes.

Hypothesis tries the same examples in every run and does not time them, so that a commit passes or fails for good;
`pytest --hypothesis-profile=explore` looks for new ones. `pytest --ledger` has the device of the tests, on which those
marked `gpu` run; without it they run on CUDA where there is one.
"""

import gc
import logging
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from accelerator import ledger
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile("repeatable")

if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:  # the processes of `pytest -n` fill the cores
    torch.set_num_threads(1)

if not torch.cuda.is_available():  # else whatever makes fake tensors looks for a driver each time, as Lightning has it
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

_structured = logging.getLogger("torch.__trace")  # TorchDynamo's log, which is written where there is a handler
_structured.disabled = True  # pytest would format and keep it
_structured.handlers.clear()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ledger", action="store_true", help="run tests marked gpu on the device of the tests")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--ledger"):
        try:
            ledger.load()
        except ledger.MissingToolError as error:
            raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(tryfirst=True)  # before markers select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: set[str] = set()
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            function = item.nodeid.partition("[")[0]
            if function in seen:
                item.add_marker("slow")
            seen.add(function)


def pytest_collection_finish() -> None:
    """What is imported and collected stays: Python's collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Every test draws the same numbers, whatever runs before it in its process."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for the test, in whatever process it runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> torch.device:
    """A device that is not the host: for tests marked `gpu`."""
    if request.config.getoption("--ledger"):
        return torch.device(ledger.NAME, 0)
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; `pytest --ledger` runs it on the device of the tests")
    return torch.device("cuda", 0)


@pytest.fixture(params=["handed over", "copied"])
def memory_changes_hands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of storages is handed over, where PyTorch can do that, and copied."""
    from lightning_remat import devices  # after what is set above

    if request.param == "copied":
        for ability in ("can_exchange_memory", "can_forbid_access"):
            monkeypatch.setattr(devices, ability, False)
    elif not devices.can_exchange_memory:
        pytest.skip("this PyTorch cannot hand over memory")
