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
        """That a function is looked into which an object of a class, or the class, has been asked for.

        By all names that it has there: `nn.Linear.forward = patched` is called otherwise than its name says.
        """
        for base in kind.__mro__:
            for name in [name for name, value in list(vars(base).items()) if _function_of(value) is function]:
                is_own = _function_of(getattr(kind, name, None)) is function  # else it was asked for by `super()`
                self._known.setdefault((kind if is_own else base, name), function)

    def replaced(self) -> tuple[tuple[type, str, Any], ...]:
        """Of which classes methods are others now, their names, and what they are."""
        all_known = list(self._known.items())  # of which another thread may note more meanwhile
        now = [(kind, name, getattr(kind, name, None), known) for (kind, name), known in all_known]
        changed = [(k, name, _function_of(found), known) for k, name, found, known in now if found is not known]
        return tuple([(kind, name, found) for kind, name, found, known in changed if found is not known])

    @contextmanager
    def noted(self) -> Generator[None]:
        """Notes what this thread captures inside."""
        before, _here.noting = getattr(_here, "noting", None), (self, set[tuple[Any, type]]())
        try:
            yield
        finally:
            _here.noting = before


def _function_of(attribute: Any) -> Any:
    """What runs for an attribute of a class that binds its function to the class, or is a property."""
    return getattr(attribute, "__func__", None) or getattr(attribute, "fget", None) or attribute


def _noted(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def call_function(variable: Any, frame: Any, args: Any, kwargs: Any) -> Any:
        noting: tuple[Methods, set[tuple[Any, type]]] | None = getattr(_here, "noting", None)
        of = variable.obj if isinstance(variable, UserMethodVariable) else args[0] if args else None
        if noting is not None and (kind := _kind_of(of)) is not None:
            methods, noted = noting
            if (variable.fn, kind) not in noted:
                noted.add((variable.fn, kind))
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
