"""`nn.SyncBatchNorm` on several devices, captured as two calls of our own: of its kernels PyTorch has no fake ones."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch._dynamo.variables import TorchInGraphFunctionVariable, VariableTracker
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch.nn.modules._functions import SyncBatchNorm

from ..operations.synchronized import alone, is_alone, synchronized_batch_norm, synchronized_statistics
from .shared_setting import Exchange, SharedSettings, captures_here

# TorchDynamo's own names; nothing of them is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false


def _captured_in_two(apply: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(apply)
    def call_apply(function: Any, frame: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if function.fn_cls is not SyncBatchNorm or not captures_here():
            return apply(function, frame, args, kwargs)
        x, weight, bias, running_mean, running_var, eps, momentum, group, _ = args
        group = group.realize().value
        group = getattr(group, "real_obj", group)  # torch 2.11 has the group itself there
        name = VariableTracker.build(frame, group.group_name)

        def called(in_graph: Callable[..., Any], *given: Any) -> Any:
            return TorchInGraphFunctionVariable(in_graph).call_function(frame, list(given), {})

        statistics = called(synchronized_statistics, x, running_mean, running_var, eps, momentum, name)
        return called(synchronized_batch_norm, x, weight, bias, statistics, eps, name)

    return call_apply


def _in_two_if_alone(apply: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(apply)
    def apply_either(*args: Any) -> Any:
        if not is_alone():
            return apply(*args)
        x, weight, bias, running_mean, running_var, eps, momentum, group, _ = args
        statistics = synchronized_statistics(x, running_mean, running_var, eps, momentum, group.group_name)
        return synchronized_batch_norm(x, weight, bias, statistics, eps, group.group_name)

    return apply_either


CHANGES = [Exchange(AutogradFunctionVariable, "call_apply", _captured_in_two)]

_STANDING_IN = SharedSettings(Exchange(SyncBatchNorm, "apply", _in_two_if_alone), capturing=False)


@contextmanager
def unsynchronized() -> Generator[None]:
    """What this thread runs inside exchanges no statistics, captured or not; see `alone`.

    For steps that a process tries by itself, as often as it likes.
    """
    with _STANDING_IN.wanted(), alone():
        yield
