"""Why a forward is no single graph, and where."""

from __future__ import annotations

import re
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from ..module_state.refusals import SWITCH_ON

# pyright: reportUnknownMemberType=false

_SIZED: Any = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
"""What has sizes, or is one, that may not be known."""

_RESUMED = re.compile(rf"{TORCH_DYNAMO_RESUME_IN_PREFIX}_(.*)_at_(\d+)")
"""What TorchDynamo calls the rest of a function behind a break: the function's name, and a line."""

_RAISED = "Developer debug context: raised exception "

_FRAMES = r"\nException raised from"
"""Where in an error of C++, as it is spelled within another, the frames begin in which it was raised."""


class CaptureError(Exception):
    """A forward is no single graph.

    Attributes:
        where: `file:line` of the user's code, where TorchDynamo tells.
        is_final: Whether it has been captured so often that it will not be captured again.
        remedy: What its author can do.
    """

    remedy = "keep what cannot be captured outside the forward, or in a submodule of its own"

    def __init__(self, message: str, where: str | None, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.where, self.is_final = where, is_final


class SwitchedOffError(CaptureError):
    """TorchDynamo captures nothing in this process."""

    remedy = SWITCH_ON


def refuse_values(graph: fx.Graph) -> None:
    """Refuses a graph in which a tensor's value becomes a number or a size: nobody knows it before the graph runs.

    TorchDynamo breaks a forward there, unless it must be one graph.

    Raises:
        CaptureError: It is one.
    """
    for n in graph.nodes:
        values = tree_leaves(n.meta.get("example_value"))
        if any(free_unbacked_symbols(v) for v in values if isinstance(v, _SIZED)):
            raise CaptureError("what follows depends on the values of a tensor", where_of(n))


def where_of(n: fx.Node) -> str | None:
    """`file:line` of the user's code in which a node was captured."""
    lines = re.findall(r'File "(.*)", line (\d+)', n.stack_trace or "")
    return ":".join(lines[-1]) if lines else None


def why(error: Exception, *, is_final: bool = False) -> CaptureError:
    """What was raised while TorchDynamo captured, in a sentence."""
    if isinstance(error, BackendCompilerFailed) and isinstance(error.inner_exception, CaptureError):
        return error.inner_exception
    kind = "" if isinstance(error, TorchDynamoException) else f"{type(error).__name__}: "
    return CaptureError(kind + _first_lines(error), _where(error), is_final=is_final)


def _first_lines(error: BaseException) -> str:
    """The sentence in which TorchDynamo says why; where it only met an error of the user's, that one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = next((line.removeprefix(_RAISED) for line in lines if line.startswith(_RAISED)), None)
    if raised is not None:
        return f"it raises {raised}".partition(_FRAMES)[0]
    explanation = next((line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Expl")), "")
    return " ".join(filter(None, [lines[0] if lines else type(error).__name__, explanation.partition(_FRAMES)[0]]))


def _where(error: BaseException) -> str | None:
    stack = getattr(error, "real_stack", None)
    for frame in reversed(stack or []):
        if Path(frame.filename).parent != Path(__file__).parent:
            return f"{frame.filename}:{frame.lineno}"
    return None


def exhausted(code: CodeType, most: int) -> str:
    """What is told of code that is captured no more, as it has been so often; a forward of one graph raises instead."""
    resumed = _RESUMED.fullmatch(code.co_name)
    name, line = resumed.groups() if resumed is not None else (code.co_name, code.co_firstlineno)
    return (
        f"{name} runs without rematerialization from {code.co_filename}:{line} on where it does something new: it has "
        f"done so {most} times. Remedy: keep what changes from step to step out of it"
    )
