"""TorchDynamo says nothing while this package captures: it would speak to people who compile.

It asks every input whether it has a gradient, of which PyTorch warns, and users may want warnings to be errors; where a
forward asks for a value, it advises a setting, and where it calls what cannot be captured, how to report that; where
something runs as it is, it logs why at length, which is told to who sets `TORCH_LOGS`; so is, with a traceback, what an
operation does not do on fake tensors. torch 2.11 moreover makes objects of functions of autograd, of which PyTorch
warns, and notes its settings of each capture as JSON, of which functions are none, so that it logs an error.

Nor does it note how long guards take, for which it empties the processor's caches, and for the words of each guard the
name of a file is shortened once.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, cast

from torch._dynamo import guards, utils
from torch._dynamo.variables import TensorVariable
from torch.utils import _traceback

from .shared_setting import Exchange, captures_here

_FILTERS: list[Any] = [
    ("ignore", re.compile(message), kind, re.compile(r"torch\._(dynamo|subclasses)"), 0)
    for message, kind in (
        ("The .grad attribute of a Tensor that is not a leaf", UserWarning),
        (".* should not be instantiated. Methods on autograd functions", DeprecationWarning),
    )
]


class _Unwarned:
    """The filters of warnings with these before them."""

    def make(self) -> None:
        cast("list[Any]", warnings.filters)[:0] = _FILTERS

    def undo(self) -> None:
        for made in _FILTERS:
            with suppress(ValueError):  # users may have set others meanwhile
                cast("list[Any]", warnings.filters).remove(made)


class _Unlogged:
    """What a capture logs is filtered.

    Args:
        logger: The name of what logs.
        most: The highest level that nobody is to hear.
    """

    def __init__(self, logger: str, most: int) -> None:
        self._logger, self._most = logging.getLogger(logger), most

    def make(self) -> None:
        self._logger.addFilter(self._is_for_others)

    def undo(self) -> None:
        self._logger.removeFilter(self._is_for_others)

    def _is_for_others(self, record: logging.LogRecord) -> bool:
        return not captures_here() or record.levelno > self._most or self._logger.isEnabledFor(logging.DEBUG)


def _to_others(warn: Callable[..., None]) -> Callable[..., None]:
    def warn_once(*args: Any, **kwargs: Any) -> None:
        if not captures_here():
            warn(*args, **kwargs)

    return warn_once


def _for_others(measure: Callable[..., float]) -> Callable[..., float]:
    def seconds(*args: Any) -> float:
        return 0.0 if captures_here() else measure(*args)

    return seconds


CHANGES = [
    _Unwarned(),
    _Unlogged("torch._dynamo.convert_frame", logging.WARNING),
    _Unlogged("torch._subclasses.fake_tensor", logging.ERROR),
    Exchange(utils, "warn_once", _to_others),
    Exchange(utils, "_get_dynamo_config_for_logging", lambda _: lambda: None),
    Exchange(TensorVariable, "_warn_capture_scalar_outputs", lambda _: staticmethod(lambda: None)),
    Exchange(guards, "profile_guard_manager", _for_others),
    Exchange(_traceback, "shorten_filename", cache),
]
