"""Where what is captured ends before something that no graph can have, and whose code that is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from torch._dynamo.exc import unimplemented

from ..module_state.own_code import is_own_file


def divide_at(what: str, reason: str, instead: str = "it runs as it is, between two graphs.") -> NoReturn:
    """Ends the graph that is captured before a call.

    Args:
        what: Is called.
        reason: Why no graph can have it; ends in a colon.
        instead: What becomes of it.
    """
    unimplemented(gb_type=reason, context=what, explanation=instead, hints=[])


def run_as_it_is(what: str, reason: str) -> NoReturn:
    """Leaves the function that is captured as it is; where it is called by one that is captured, divides that.

    Args:
        what: Of which no graph can have what is done with it.
        reason: Why; ends in a colon.
    """
    unimplemented(gb_type=reason, context=what, explanation="its function runs as it is.", hints=[], skip_frame=True)


def is_own_frame(frame: Any) -> bool:
    """Whether the code that does what TorchDynamo captures in a frame is the user's own: nobody has installed it.

    What TorchDynamo has in the place of functions in C is code of who calls these.
    """
    frame = next((f for f in callers(frame) if not name_of_file(f).startswith("torch._dynamo.")), frame)
    return is_own_file(frame.f_code.co_filename)


def name_of_file(frame: Any) -> str:
    """By which the file of a frame's code is imported."""
    return str(frame.f_globals.get("__name__", ""))


def callers(frame: Any) -> Iterator[Any]:
    """The frame of a function and those that are captured around it, the innermost first."""
    while frame is not None:
        yield frame
        frame = getattr(frame, "parent", None)
