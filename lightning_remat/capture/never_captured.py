"""Functions that TorchDynamo leaves alone, with all that they call."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar, cast

from torch._dynamo import eval_frame
from torch._dynamo.types import FrameAction, FrameExecStrategy  # pyright: ignore[reportPrivateImportUsage]

Function = TypeVar("Function", bound=Callable[..., Any])

_set_strategy = cast("Callable[[CodeType, FrameExecStrategy], None]", cast(Any, eval_frame).set_code_exec_strategy)


def never_captured(function: Function) -> Function:
    """The function itself, which runs as it is wherever it is called.

    As a hook of autograd's: where code differentiates between the graphs of a captured forward, TorchDynamo would
    capture the hooks too. Calls cost nothing beside, other than those of what `torch.compiler.disable` returns.
    """
    _set_strategy(cast(FunctionType, function).__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    return function
