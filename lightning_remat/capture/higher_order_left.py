"""What calls functions of the user's (`torch.cond`, a loop, `flex_attention`), or kernels, runs between two graphs.

It would be a graph within the graph, of which no plan knows what is saved, written or drawn there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy
from torch._dynamo.variables.functions import TritonKernelVariable
from torch._dynamo.variables.higher_order_ops import TorchHigherOrderOperatorVariable
from torch._ops import HigherOrderOperator

from .divisions import divide_at, name_of_file
from .shared_setting import Exchange, captures_here

# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false

_LEFT = frozenset(
    {
        "cond",
        "flex_attention",
        "invoke_subgraph",  # `torch.compiler.nested_compile_region`
        "map_impl",
        "scan",
        "switch",
        "while_loop",
    }
)
"""Names of operators that call functions."""

_THEIR_OWN = "torch._higher_order_ops.", "torch.nn.attention.flex_attention", "triton."
"""Modules of the code that runs them: TorchDynamo would capture what that does, and what it calls, piece by piece."""


def left(frame: Any) -> ConvertFrameReturn | None:
    """That the code of a frame runs as it is, with all that it calls, if it is theirs."""
    if not name_of_file(frame).startswith(_THEIR_OWN):
        return None
    return ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP), apply_to_code=False)


def _divided(make: Callable[..., Any]) -> object:
    @wraps(make)
    def made(value: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
        if captures_here() and value.__name__ in _LEFT:  # where it is found: of some a call may not break
            divide_at(value.__name__, "an operator calls functions:")
        return make(value, *args, **kwargs)

    return staticmethod(made)


def _unseen(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def made(variable: Any, kernel: Any, *args: Any, **kwargs: Any) -> None:
        if captures_here():  # before it has a grid, which would have to be handed over with it
            divide_at(getattr(kernel, "__name__", type(kernel).__name__), "a kernel of Triton is launched:")
        init(variable, kernel, *args, **kwargs)

    return made


CHANGES = [
    Exchange(TorchHigherOrderOperatorVariable, "make", _divided),
    Exchange(TritonKernelVariable, "__init__", _unseen),
]
