"""Methods of classes: TorchDynamo looks into them and guards none, and one that is replaced later would not count."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch._dynamo.variables import (
    LazyVariableTracker,
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
    UserFunctionVariable,
    UserMethodVariable,
)

from .shared_setting import Exchange

# TorchDynamo's own names; nothing of them is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

_here = threading.local()


class Methods:
    """Those that captures have looked into, and what each was then.

    >>> class Doubling:
    ...     def call(self, x):
    ...         return 2 * x
    >>> methods, first = Methods(), Doubling.call
    >>> methods.note(first, Doubling)
    >>> methods.replaced()
    ()
    >>> Doubling.call = lambda self, x: 3 * x
    >>> len(methods.replaced())
    1
    >>> Doubling.call = first
    >>> methods.replaced()
    ()
    """

    def __init__(self) -> None:
        self._known: dict[tuple[type, str], Any] = {}

    def note(self, function: Any, kind: type) -> None:
        """That a function is looked into which an object of a class, or the class, has been asked for."""
        name = function.__name__
        for base in kind.__mro__:
            if _function_of(getattr(base, name, None)) is function:
                self._known.setdefault((base, name), function)
                return

    def replaced(self) -> tuple[tuple[type, str, Any], ...]:
        """Of which classes methods are others now, their names, and what they are."""
        now = [(kind, name, getattr(kind, name, None), known) for (kind, name), known in self._known.items()]
        changed = [(k, name, _function_of(found), known) for k, name, found, known in now if found is not known]
        return tuple([(kind, name, found) for kind, name, found, known in changed if found is not known])

    @contextmanager
    def noted(self) -> Generator[None]:
        """Notes what this thread captures inside."""
        before, _here.methods = getattr(_here, "methods", None), self
        try:
            yield
        finally:
            _here.methods = before


def _function_of(attribute: Any) -> Any:
    """What runs for an attribute of a class that binds its function to the class, or is a property."""
    return getattr(attribute, "__func__", None) or getattr(attribute, "fget", None) or attribute


def _noted(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def call_function(variable: Any, frame: Any, args: Any, kwargs: Any) -> Any:
        methods: Methods | None = getattr(_here, "methods", None)
        of = variable.obj if isinstance(variable, UserMethodVariable) else args[0] if args else None
        if methods is not None and (kind := _kind_of(of)) is not None:
            methods.note(variable.fn, kind)
        return call(variable, frame, args, kwargs)

    return call_function


def _kind_of(variable: Any) -> type | None:
    """The class of what comes first, or the class that this is; None where it is neither, or is not looked at yet."""
    if isinstance(variable, LazyVariableTracker):
        if not variable.is_realized():
            return None
        variable = variable.realize()
    if isinstance(variable, UserDefinedClassVariable):
        return variable.value
    return variable.value_type if isinstance(variable, UserDefinedObjectVariable) else None


CHANGES = [Exchange(UserFunctionVariable, "call_function", _noted)]
