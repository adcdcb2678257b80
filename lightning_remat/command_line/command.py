"""The command itself: exit code 0 with an answer, 1 where nothing fits, 2 where the question is wrong."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
import warnings
from collections.abc import Generator, Sequence

from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensorMode

from ..budget import format_bytes
from ..errors import InfeasibleBudgetError, TraceError
from ..measure.cost_model import assumed_speed
from ..reports.html_page import write_page
from .answer import answer_as_json, print_answer, save_plan
from .devices import this_machine
from .network import make_network
from .request import Request, parse_request
from .sharding import imagined_world
from .study import Tell, study
from .usage_error import UsageError, one_line

FITS, DOES_NOT_FIT, WRONG_QUESTION, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: Those of the command line if None.

    Returns:
        The exit code.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _answer(parse_request(arguments))
    except SystemExit as asked_for_help:
        return int(asked_for_help.code or 0)
    except KeyboardInterrupt:
        return _refuse("interrupted", INTERRUPTED)
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        return _refuse(*_told(error))


def _told(error: Exception) -> tuple[str, int]:
    """The error in one line, and the exit code."""
    if isinstance(error, InfeasibleBudgetError):
        return _does_not_fit(error), DOES_NOT_FIT
    if isinstance(error, (UsageError, TraceError)):
        return " ".join(str(error).split()), WRONG_QUESTION
    return f"{one_line(error)} (--debug shows where)", WRONG_QUESTION  # of the model's code, or a mistake of ours


def _refuse(text: str, code: int) -> int:
    print(f"lightning-remat: {text}", file=sys.stderr)
    return code


def _does_not_fit(error: InfeasibleBudgetError) -> str:
    budget = "" if error.budget_bytes is None else f" into {format_bytes(error.budget_bytes)}"
    node = "" if error.node is None else f", because of operation {error.node}"
    return f"does not fit{budget}: the lowest peak is {format_bytes(error.minimum_bytes)}{node}"


def _answer(request: Request) -> int:
    with _progress() as tell, warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")  # of other people's code: the answer is what is wanted
        tell(f"making {request.target}")
        device = request.device or this_machine(request.precision)
        mode = FakeTensorMode()
        with imagined_world(request.world_size) if request.strategy == "fsdp2" else contextlib.nullcontext() as mesh:
            network = make_network(request, mode, mesh)
            with mode, assumed_speed(device.speed_at(request.precision)):
                found = study(network, request, tell)
    if request.save is not None:
        save_plan(found.result.step, request.save)
    if request.report is not None:
        write_page(found.result, request.report, title=f"{network.name}, {request.precision}")
    if request.as_json:
        print(answer_as_json(network, request, found, device))
        return FITS
    console = Console()
    print_answer(network, request, found, device, console)
    for what, path in (("plan", request.save), ("page", request.report)):
        if path is not None:
            console.print(f"{what}: {path}", highlight=False)
    return FITS


@contextlib.contextmanager
def _progress() -> Generator[Tell]:
    """A line on stderr that says what is being done, where stderr is a terminal."""
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        # What is wrong is told in one line at the end; fake tensors would log a traceback of it.
        for name in ("lightning_remat", "torch._subclasses.fake_tensor"):
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        yield stack.enter_context(console.status("starting")).update if console.is_terminal else lambda _: None
